"""A causal chat model for tests: it learns 24 conversations in seconds and is saved with its tokenizer and chat template."""

import shutil

import numpy as np
import torch

from brimful.data.store import Store, StoreWriter, spans_of
from brimful.data.tokenizer.folder import TokenizerFacts, write_template
from brimful.tasks.causal_lm import CausalLM
from brimful.tasks.chat_template import ChatTemplate
from brimful.tasks.presets import CHAT_TEMPLATE
from tests.tasks.tiny import COLOURS, make_tokenizer, save, write_jsonl

SYSTEM = "简短。"


def talk(*texts, system=None):
    """A conversation: question, answer, question, answer …"""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]


CONVERSATIONS = [
    conversation
    for number, (name, colour) in enumerate(zip("甲乙丙丁戊己庚辛", COLOURS, strict=True))
    for conversation in (
        talk(f"{name}的花？", f"{colour}色" * (1 + number % 2) + "。"),
        talk(f"{name}的很长很长的一条路？", f"{colour}色𠀀。", system=SYSTEM if number % 2 else None),
        talk(f"{name}的花？", f"{colour}色" * (1 + number % 2) + "。", "车？", f"{colour}车。"),
    )
]
"""24 of different lengths. The answer to the second question of every third depends on the first. Every third has a
character that is not in the vocabulary and becomes bytes."""


def make_config(kind="qwen2", vocab_size=512, **changes):
    """The configuration of a tiny model of some family."""
    from transformers import AutoConfig

    sizes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
    }
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    common = {**sizes, **ids, "num_hidden_layers": 2, "max_position_embeddings": 512, "vocab_size": vocab_size}
    own = {
        "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 12},
        "mistral": {"sliding_window": 8},
        "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 512},
    }  # fmt: skip
    fields = {**ids, "vocab_size": vocab_size} if kind == "gpt2" else common
    return AutoConfig.for_model(kind, **{**fields, **own.get(kind, {}), "use_cache": False, **changes})


def make_causal(kind="qwen2", vocab_size=512, dtype=torch.float32, **changes):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(kind, vocab_size, **changes)).to(dtype).eval()


def write_store(folder, template, conversations, *, spans=True, max_tokens=256):
    """A token store of these conversations, with the tokens that are trained on unless it is for pretraining."""
    rows = [row for one in conversations for row in template.encode(one)]
    fields = ("tokens", "spans") if spans else ("tokens",)
    writer = StoreWriter(folder, fields, template.vocab_size)
    for row in rows:
        parts = [np.array(row.tokens), spans_of(row.trained)][: len(fields)]
        writer.add(np.concatenate(parts), np.array([[len(part) for part in parts]]))
    facts = TokenizerFacts.read(template.folder)
    writer.finish(
        tokenizer=template.folder, max_tokens={"tokens": max_tokens}, eos_id=facts.eos_id, pad_id=facts.pad_id,
        tokenizer_fingerprint=facts.fingerprint, rows_in=len(conversations), dropped={}, truncated={"tokens": 0},
    )  # fmt: skip
    return Store.open(folder)


def learn_causal(model, store, steps=75, rate=1e-2):
    """Train until every conversation is known."""
    family = CausalLM(model.config)
    batch = family.collate(store.__getitems__(list(range(len(store)))))
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / steps) ** 0.5
        optimizer.zero_grad()
        loss = family.loss(model, batch, 0.0)
        (loss.sum / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


class TinyCausal:
    """Raw conversations, a tokenizer with a chat template, a token store, and a model that knows the conversations."""

    def __init__(self, folder):
        self.folder = folder
        self.raw = write_jsonl(folder / "rows.jsonl", [{"messages": one} for one in CONVERSATIONS])
        texts = [{one["role"]: one["content"] for one in conversation} for conversation in CONVERSATIONS]
        self.tokenizer = make_tokenizer(folder / "tokenizer", texts)
        write_template(self.tokenizer, CHAT_TEMPLATE)
        self.template = ChatTemplate.load(self.tokenizer)
        self.store = write_store(folder / "store", self.template, CONVERSATIONS)
        sizes = {
            "hidden_size": 64,
            "head_dim": 16,
            "num_hidden_layers": 1,
        }  # one layer learns it in half the time of two
        self.net = learn_causal(make_causal(vocab_size=self.template.vocab_size, **sizes), self.store)
        self.model = save(self.net, folder / "model", self.tokenizer)

    @property
    def weight_bytes(self):
        return sum(one.nbytes for one in self.net.parameters())

    def prompts(self):
        """Of the last reply of each conversation."""
        return [self.template.prompt(one[:-1]) for one in CONVERSATIONS]

    def without_template(self, folder):
        """A copy of the model that has none."""
        import json

        shutil.copytree(self.model, folder)
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({k: v for k, v in config.items() if k != "chat_template"})
        )
        return folder


_shared = []


def tiny_causal(tmp_path_factory):
    """One for the whole session, for tests of several packages."""
    if not _shared:
        _shared.append(TinyCausal(tmp_path_factory.mktemp("causal")))
    return _shared[0]
