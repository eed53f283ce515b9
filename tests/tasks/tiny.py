"""A chat model for tests: it learns 24 questions in a second and is saved with its tokenizer."""

import json

import torch

from brimful.data.store import Store
from brimful.data.tokenize import TokenizeOptions
from brimful.data.tokenizer.folder import TokenizerFacts
from brimful.data.tokenizer.train import TokenizerOptions, train_tokenizer
from brimful.tasks.language import LanguageOptions, Pretrain
from brimful.units import GiB

ROOMY = TokenizeOptions(host_limit_bytes=8 * GiB)
"""The limit counts the whole process, which after many tests holds more than the default."""
COLOURS = ["红", "橙", "黄", "绿", "青", "蓝", "紫", "白"]
ROWS = [
    {"prompt": f"{name}的{thing}是什么颜色？", "response": f"{colour}色" * (1 + number % 3) + end}
    for number, (name, colour) in enumerate(zip("甲乙丙丁戊己庚辛", COLOURS, strict=True))
    for thing, end in (("花", "。"), ("很长很长的一条路", "，是的。"), ("车", "𠀀。"))
]
"""24 rows of different lengths. Every third has a character that is not in the vocabulary and becomes bytes."""


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def make_tokenizer(folder, rows=ROWS):
    """A tokenizer with one token per character, because no word of its training text is longer."""
    plain = [{side: " ".join(text.replace("𠀀", "")) for side, text in row.items()} for row in rows]
    source = write_jsonl(folder.parent / f"{folder.name}.jsonl", plain * 3)
    train_tokenizer([str(source)], output=folder, options=TokenizerOptions(vocab_size=512))
    return folder


def make_model(vocab_size=512, **changes):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = {**sizes, **ids, "vocab_size": vocab_size, "use_cache": False, "dropout_rate": 0.0, **changes}
    return T5ForConditionalGeneration(T5Config(**config))


def save(model, folder, tokenizer):
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        if file.name != "report.json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def learn(model, store, steps=130, rate=1e-2):
    """Train until every row is answered correctly."""
    task = Pretrain(options=LanguageOptions(model="chatlm-tiny"))
    batch = task.collate(store.__getitems__(list(range(len(store)))))
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / steps) ** 0.5
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        (loss.sum / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


class TinyChat:
    """Raw rows, a tokenizer, a token store, and a model that knows the rows, in memory and on disk."""

    def __init__(self, folder):
        from brimful.data.tokenize import tokenize

        self.folder = folder
        self.raw = write_jsonl(folder / "rows.jsonl", ROWS)
        self.tokenizer = make_tokenizer(folder / "tokenizer")
        tokenize([str(self.raw)], tokenizer=self.tokenizer, output=folder / "store")
        self.store = Store.open(folder / "store")
        self.net = learn(make_model(TokenizerFacts.read(self.tokenizer).vocab_size), self.store)
        self.model = save(self.net, folder / "model", self.tokenizer)

    def prompts(self):
        return [row["prompt"] for row in self.store]


_shared = []


def tiny_chat(tmp_path_factory):
    """One for the whole session, for tests of several packages."""
    if not _shared:
        _shared.append(TinyChat(tmp_path_factory.mktemp("chat")))
    return _shared[0]
