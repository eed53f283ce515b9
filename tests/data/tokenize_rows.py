"""Rows of a few texts, and a small tokenizer for them."""

import json

from tokenizers import Regex, Tokenizer, models, normalizers, trainers

TEXTS = [
    "今天天气很好，我们去公园吧。",
    "what a day, what a day",
    "鱼油是浓度越高越好。\n两行",
    "一",
    "写着 [EOS] 的文字",
    "结尾[EOS]",
]


def make_tokenizer(folder):
    """A small BPE tokenizer in the layout of transformers, whose normaliser removes the letter ∅."""
    specials = ["[PAD]", "[EOS]", "[UNK]"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex("∅"), "")])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        max_token_length=3,
        special_tokens=specials + [f"<0x{n:02X}>" for n in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.enable_truncation(3)  # a folder may carry that; it must not matter
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]", "pad_token": "[PAD]"}))
    return folder


def rows(number, first=0):
    """Distinct rows of different lengths."""
    return [
        {"prompt": f"{n} {TEXTS[n % len(TEXTS)]}", "response": TEXTS[(n + 1) % len(TEXTS)] * (1 + n % 4)}
        for n in range(first, first + number)
    ]


def write_jsonl(path, content):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
    return str(path)
