"""Tiny causal models on disk, and a task that trains an adapter of one."""

import torch
import torch.nn.functional as F

from brimful.task import Loss, Task
from brimful.tasks import adapters
from brimful.tasks.adapters import Lora, load_base, new_base, with_adapter

VOCAB = 96


def config(kind="qwen2", **changes):
    from transformers import LlamaConfig, Qwen2Config

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    tied = {"tie_word_embeddings": kind == "qwen2"}
    return {"qwen2": Qwen2Config, "llama": LlamaConfig}[kind](**{**sizes, **tied, **changes})


def make_base(folder, kind="qwen2", *, seed=0, std=0.2, dtype=torch.float32, shards="1GB", **changes):
    """A model folder with random weights, large enough that an adapter matters."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(kind, **changes)).to(dtype)
    for param in model.parameters():
        if param.ndim > 1:
            param.data.normal_(std=std)
    model.save_pretrained(folder, max_shard_size=shards)
    (folder / "tokenizer.json").write_text('{"of": "base"}')
    return folder


def add_noise(model, scale=0.03):
    """An adapter that changes something: PEFT begins with one that does not."""
    draw = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if param.requires_grad and "magnitude" not in name:
            param.data += scale * torch.randn(param.shape, generator=draw)
    return model


def tokens(rows=4, length=12):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(9))


def logits(model, dtype=torch.float32):
    with torch.no_grad():
        return model.eval()(input_ids=tokens(), use_cache=False).logits.to(dtype)


class Rows(list):
    """Uneven rows that repeat a pattern, so that there is something to learn."""

    def __init__(self, count=48, longest=20):
        draw = torch.Generator().manual_seed(5)
        lengths = torch.randint(6, longest, (count,), generator=draw).tolist()
        super().__init__((torch.arange(length) * 7 + place) % (VOCAB - 3) + 3 for place, length in enumerate(lengths))


class Adapted(Task):
    """An adapter of a causal model, as the language tasks train it."""

    name = "adapted"
    global_batch = 8
    worst_shape = (20,)

    def __init__(self, base, lora="r=4,dropout=0.1", load_in=None, dtype=torch.float32):
        super().__init__()
        self.base, self.lora, self.load_in, self.dtype = str(base), Lora.parse(lora), load_in, dtype

    def model(self):
        from transformers import AutoConfig

        return with_adapter(new_base(AutoConfig.from_pretrained(self.base), self.load_in, self.dtype), self.lora)

    def initial_model(self):
        return with_adapter(load_base(self.base, self.load_in, dtype=self.dtype), self.lora)

    def trained_weights(self, model):
        return adapters.trained_weights(model)

    def save(self, model, folder, rows):
        adapters.save(model, folder)
        (folder / "tokenizer.json").write_text('{"of": "adapter"}')

    def shape(self, row):
        return (len(row),)

    def dummy_row(self, shape):
        return torch.randint(3, VOCAB, shape)

    def collate(self, rows):
        ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        return {"ids": ids, "labels": torch.nn.utils.rnn.pad_sequence(list(rows), True, -100)}

    def loss(self, model, batch):
        found = model(input_ids=batch["ids"], use_cache=False).logits[:, :-1].float()
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(found.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return Loss(sum=loss, count=(labels != -100).sum())
