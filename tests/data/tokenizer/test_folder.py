"""Tokenizer folders of any origin: what is read from them, what is switched off, what is refused."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from brimful.data.tokenizer.folder import TokenizerFacts, load_tokenizer
from brimful.errors import BadData

VOCAB = {"<unk>": 0, "</s>": 1, "<pad>": 2, "好": 3, "<": 4, "/": 5, "s": 6, ">": 7, "s>": 8}


def folder(tmp_path, *, config=None, special=None, change=lambda tokenizer: None):
    """As transformers saves it."""
    tokenizer = Tokenizer(models.BPE(VOCAB, [("s", ">")], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "</s>", "<pad>"])
    change(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def test_ids_are_those_of_the_config(tmp_path):
    facts = TokenizerFacts.read(folder(tmp_path, config={"eos_token": "</s>", "pad_token": {"content": "<pad>"}}))
    assert (facts.eos_id, facts.pad_id, facts.vocab_size) == (1, 2, 9)
    assert len(facts.fingerprint) == 64


def test_older_folders_name_them_in_the_special_tokens_map(tmp_path):
    facts = TokenizerFacts.read(folder(tmp_path, config={"eos_token": None}, special={"eos_token": "</s>"}))
    assert (facts.eos_id, facts.pad_id) == (1, None)


def test_the_config_wins_over_the_map(tmp_path):
    assert (
        TokenizerFacts.read(folder(tmp_path, config={"eos_token": "</s>"}, special={"eos_token": "<pad>"})).eos_id == 1
    )


def test_the_size_reaches_the_largest_id(tmp_path):
    facts = TokenizerFacts.read(
        folder(tmp_path, config={"eos_token": "</s>"}, change=lambda one: one.add_tokens([AddedToken("extra")]))
    )
    assert facts.vocab_size == 10


def test_other_contents_have_another_fingerprint(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    facts = [
        TokenizerFacts.read(folder(one, config={"eos_token": "</s>"})),
        TokenizerFacts.read(folder(two, config={"eos_token": "</s>"}, change=lambda t: t.add_tokens(["more"]))),
    ]
    assert facts[0].fingerprint != facts[1].fingerprint


def test_truncation_and_padding_are_off_and_special_letters_are_letters(tmp_path):
    def change(tokenizer):
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=9)
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])

    tokenizer = load_tokenizer(folder(tmp_path, change=change))
    assert tokenizer.encode("好</s>好好", add_special_tokens=False).ids == [3, 4, 5, 8, 3, 3]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda path: (path / "tokenizer.json").write_text('{"version": "1.0", "tru'), "cannot be read as a tokenizer"),
        (lambda path: (path / "tokenizer.json").write_bytes(b"\xff\xfe"), "cannot be read as a tokenizer"),
        (lambda path: (path / "tokenizer_config.json").write_text("{"), "tokenizer_config.json cannot be read"),
        (
            lambda path: (path / "tokenizer_config.json").write_text("[" * 100_000),
            "tokenizer_config.json cannot be read",
        ),
        (lambda path: (path / "tokenizer.json").write_text('{"a":' * 100_000), "cannot be read as a tokenizer"),
        (lambda path: (path / "tokenizer_config.json").write_text("[]"), "names no eos_token"),
        (lambda path: (path / "tokenizer_config.json").unlink(), "names no eos_token"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}'), "'<end>' as eos_token"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_sentence(spoil, message, tmp_path):
    folder(tmp_path, config={"eos_token": "</s>"})
    spoil(tmp_path)
    with pytest.raises(BadData, match=message) as error:
        TokenizerFacts.read(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(BadData, match="has no tokenizer.json"):
        load_tokenizer(tmp_path / "nowhere")
