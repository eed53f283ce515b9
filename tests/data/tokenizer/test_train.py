"""A tokenizer trained end to end: every text comes back, ids are fixed, nothing is left behind by a failure."""

import errno
import json
import os
import re
import threading
import time
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, pre_tokenizers

from brimful.data.tokenizer import train as training
from brimful.data.tokenizer.folder import TokenizerFacts, load_tokenizer
from brimful.data.tokenizer.train import TokenizerOptions, call_in_thread, measure, train_tokenizer
from brimful.data.tokenizer.vocabulary import FIRST_BYTE, FIRST_PIECE, SPECIAL, WORDS
from brimful.errors import BadData, BadOption, InternalError
from tests.data.tokenizer.tokenizer_rows import texts, write_rows

SIZE = 1500
MODEL = {"vocab_size": 4096, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
KINDS = ("bpe", "unigram")
HARD = [
    "", " ", "  two  spaces  ", "\ttab\n\nnewlines\r\n", "0123456789", "🙂👨‍👩‍👧‍👦🏳️‍🌈", "▁U+2581▁ ▁", "\x00\x01\x1f\x7f\x85\ufeff\u200b",
    "e\u0301 á ạ̈", "𪚥龘㐀", "مرحبا بالعالم", "<0x41>", "<0xE4><0xB8><0x80>", "[PAD][EOS] [UNK]", "Ａｂｃ１２３ ﬁ ① ㌀", "한국어 ひらがな カタカナ",
    "\uffff\U0010ffff", "a" * 5000, "的" * 5000,
]  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module", params=KINDS)
def trained(request, rows, tmp_path_factory):
    """The folder of each kind, and its report."""
    folder = tmp_path_factory.mktemp(request.param) / "tokenizer"
    options = TokenizerOptions(vocab_size=SIZE, kind=request.param)
    return folder, train_tokenizer([rows], output=folder, options=options, model_config=MODEL)


@pytest.fixture(scope="module")
def tokenizer(trained):
    return load_tokenizer(trained[0])


@pytest.fixture(scope="module")
def of_transformers(trained):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(trained[0]))


def there_and_back(tokenizer, text):
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", HARD, ids=lambda text: ascii(text[:12]))
def test_hard_texts_come_back_as_their_nfkc(tokenizer, text):
    assert there_and_back(tokenizer, text) == unicodedata.normalize("NFKC", text)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="[EOS]<0x0A>")
def test_any_text_comes_back_normalised_and_without_unknown_tokens(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.normalizer.normalize_str(text)
    assert all(number >= FIRST_BYTE for number in ids)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(
        st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs", "Cn"])
        | st.sampled_from("的一，。Ａ１ﬁ🙂[]<>0x41")
    )
)
def test_what_comes_back_is_pythons_nfkc_where_unicode_has_not_changed(tokenizer, text):
    old = "".join(character for character in text if unicodedata.ucd_3_2_0.category(character) != "Cn")
    assert there_and_back(tokenizer, old) == unicodedata.normalize("NFKC", old)


def test_transformers_loads_it_with_the_fixed_ids(of_transformers):
    from transformers import PreTrainedTokenizerFast

    assert isinstance(of_transformers, PreTrainedTokenizerFast)
    roles = ("pad", "eos", "sep", "bos", "cls", "mask", "unk")
    assert [getattr(of_transformers, f"{role}_token_id") for role in roles] == list(range(7))
    assert len(of_transformers) == SIZE
    assert set(of_transformers("好")) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("text", HARD, ids=lambda text: ascii(text[:12]))
def test_hard_texts_come_back_through_transformers(of_transformers, text):
    ids = of_transformers(text)["input_ids"]
    assert of_transformers.decode(ids, skip_special_tokens=True) == unicodedata.normalize("NFKC", text)
    assert of_transformers.decode(ids) == unicodedata.normalize("NFKC", text)


def test_transformers_and_the_loaded_tokenizer_give_the_same_ids(of_transformers, tokenizer):
    for text in [*HARD, *texts(20, seed=5)]:
        assert of_transformers(text)["input_ids"] == tokenizer.encode(text, add_special_tokens=False).ids


def test_special_tokens_and_bytes_have_the_first_ids(tokenizer):
    first = [tokenizer.id_to_token(number) for number in range(FIRST_PIECE)]
    assert first == [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    assert sorted(tokenizer.get_added_tokens_decoder()) == list(range(len(SPECIAL)))


def test_pieces_do_not_cross_the_borders_of_words(tokenizer):
    long = [piece for piece, number in tokenizer.get_vocab().items() if number >= FIRST_PIECE and len(piece) > 1]
    assert len(long) > 300
    assert any(piece.startswith(" ") for piece in long)
    for piece in long:
        assert re.fullmatch(r"[\u3400-\u9fff]+| ?[A-Za-z]+", piece), piece


def test_separating_words_before_encoding_changes_no_id(trained, tokenizer):
    cutting = load_tokenizer(trained[0])
    cutting.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    for text in texts(200, seed=9):
        assert cutting.encode(text).ids == tokenizer.encode(text).ids


def test_words_with_their_space_and_han_words_become_single_tokens(tokenizer):
    assert "the model" in "".join(tokenizer.encode(" the model").tokens)
    assert len(tokenizer.encode(" model").ids) == 1
    assert [len(token) for token in tokenizer.encode("2024").tokens] == [1, 1, 1, 1]


def test_the_report_says_what_is_in_the_folder(trained):
    folder, report = trained
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report.to_json()))
    assert report.vocab_size == TokenizerFacts.read(folder).vocab_size == SIZE
    assert report.fingerprint == TokenizerFacts.read(folder).fingerprint
    assert (report.rows_seen, report.broken, report.measured_on) == (400, 0, "held-out rows")
    assert report.rows_used + report.total.rows == 400
    assert report.special_ids == {token: number for number, token in enumerate(SPECIAL)}
    assert [(check.name, check.matches) for check in report.ids] == [(name, True) for name in MODEL]
    assert {path.name for path in folder.iterdir()} == {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "report.json",
    }  # fmt: skip


def test_the_figures_are_those_of_the_held_out_rows(trained, tokenizer):
    _, report = trained
    total = report.total
    assert total.characters == sum(fit.characters for fit in report.fields.values())
    assert total.tokens == sum(fit.tokens for fit in report.fields.values())
    assert list(report.fields) == ["prompt", "response"]
    assert 1.3 < total.characters_per_token == total.characters / total.tokens < 4
    assert (total.unknown_rate, total.byte_share, report.round_trip) == (0, 0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_and_seed_give_the_same_bytes(rows, kind, tmp_path):
    for name in ("one", "two"):
        train_tokenizer([rows], output=tmp_path / name, options=TokenizerOptions(vocab_size=900, kind=kind))
    one, two = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two"))
    assert one == two


def test_rare_characters_go_through_bytes(tmp_path):
    common = ["常用字" * 400] * 40
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*common, "龘"]))
    train_tokenizer([str(path)], output=tmp_path / "t", options=TokenizerOptions(vocab_size=512))
    tokenizer = load_tokenizer(tmp_path / "t")
    assert tokenizer.token_to_id("常") is not None
    assert tokenizer.token_to_id("龘") is None
    assert tokenizer.encode("龘").tokens == ["<0xE9>", "<0xBE>", "<0x98>"]


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_give_fewer_entries_and_say_so(kind, tmp_path):
    path = write_rows(tmp_path / "rows.parquet", 10)
    report = train_tokenizer([path], output=tmp_path / "t", options=TokenizerOptions(vocab_size=20_000, kind=kind))
    choice = report.choices[0]
    assert (choice.name, choice.requested) == ("vocab_size", 20_000)
    assert choice.effective == report.vocab_size < 2000
    assert "no more pieces" in choice.reason
    assert report.measured_on == "training rows"


def test_the_size_is_the_models_unless_given(rows, tmp_path):
    report = train_tokenizer([rows], output=tmp_path / "t", model_config={**MODEL, "vocab_size": 777})
    assert report.vocab_size == 777
    assert (report.choices[0].requested, report.choices[0].reason) == (None, "the model's vocab_size")


def test_without_a_model_nothing_is_compared(rows, tmp_path):
    report = train_tokenizer([rows], output=tmp_path / "t", options=TokenizerOptions(vocab_size=700))
    assert {check.matches for check in report.ids} == {None}


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"vocab_size": 5000}, MODEL, "vocab_size=5000 exceeds the model's vocab_size of 4096"),
        ({}, {**MODEL, "pad_token_id": 2}, "pad_token_id 2"),
        ({}, {**MODEL, "eos_token_id": [7, 8]}, "eos_token_id [7, 8]"),
        ({}, {**MODEL, "decoder_start_token_id": 250}, "decoder_start_token_id 250"),
        ({}, {**MODEL, "vocab_size": 300}, "vocab_size of 300, too small"),
    ],
)
def test_what_the_model_cannot_use_is_refused_before_any_reading(options, config, message, tmp_path):
    with pytest.raises(BadOption, match=re.escape(message)):
        train_tokenizer(
            ["no such file"], output=tmp_path / "t", options=TokenizerOptions(**options), model_config=config
        )
    assert not list(tmp_path.iterdir())


def test_one_of_several_ends_of_text_is_enough(rows, tmp_path):
    config = {**MODEL, "eos_token_id": [1, 2], "decoder_start_token_id": 3, "pad_token_id": None}
    options = TokenizerOptions(vocab_size=700)
    report = train_tokenizer([rows], output=tmp_path / "t", options=options, model_config=config)
    assert [check.matches for check in report.ids] == [True, None, True, True]


def test_all_problems_of_the_options_come_at_once():
    with pytest.raises(BadOption) as error:
        TokenizerOptions(vocab_size=300, kind="wordpiece", host_limit_bytes=0, seed=-1, max_bad=2)
    for flag in ("vocab_size=300", "kind='wordpiece'", "host_limit=0", "seed=-1", "max_bad=2"):
        assert flag in str(error.value)


def test_a_limit_that_cannot_hold_the_process_is_refused(rows, tmp_path):
    with pytest.raises(BadOption, match="host_limit='100MiB' is too small: .* Try: .*iB or more"):
        train_tokenizer([rows], output=tmp_path / "t", options=TokenizerOptions(host_limit_bytes=100 * 2**20))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "a.jsonl"),
        ("a.jsonl", '{"prompt": "", "response": ""}\n', "1 rows without any text"),
        ("a.jsonl", '{"prompt": "a", "response": "b"}\n{broken\n', "line 2"),
        ("a.parquet", "not parquet", "a.parquet"),
        ("a.jsonl", '{"x": "a", "y": "b"}\n', "a.jsonl"),
    ],
)
def test_rows_that_cannot_be_used_are_one_sentence_and_leave_nothing(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadData, match=message) as error:
        train_tokenizer([str(tmp_path / name)], output=tmp_path / "t", options=TokenizerOptions(vocab_size=600))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_broken_rows_are_left_out_and_counted_where_allowed(tmp_path):
    lines = [json.dumps({"text": text}) for text in texts(100)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "{broken"]))
    options = TokenizerOptions(vocab_size=600, max_bad=0.02)
    report = train_tokenizer([str(tmp_path / "rows.jsonl")], output=tmp_path / "t", options=options)
    assert (report.rows_seen, report.broken) == (100, 1)
    assert "line 101" in report.first_broken
    with pytest.raises(BadData, match="more than max_bad=0.001"):
        options = TokenizerOptions(vocab_size=600, max_bad=0.001)
        train_tokenizer([str(tmp_path / "rows.jsonl")], output=tmp_path / "u", options=options)
    assert not (tmp_path / "u").exists()


def test_rows_may_have_three_fields(tmp_path):
    pq.write_table(pa.table({field: texts(60) for field in ("prompt", "chosen", "rejected")}), tmp_path / "p.parquet")
    report = train_tokenizer(
        [str(tmp_path / "p.parquet")], output=tmp_path / "t", options=TokenizerOptions(vocab_size=600)
    )
    assert list(report.fields) == ["prompt", "chosen", "rejected"]


def test_progress_is_told(rows, tmp_path):
    phrases = []
    train_tokenizer(
        [rows], output=tmp_path / "t", options=TokenizerOptions(vocab_size=700, kind="unigram"), progress=phrases.append
    )
    for part in ("read 400 rows", "100 %", "weighed", "training on", "estimating", "held-out rows"):
        assert any(part in phrase for phrase in phrases), part


def test_what_occurs_once_is_not_merged(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "天地玄黄，宇宙洪荒。日月日月"}))
    report = train_tokenizer(
        [str(tmp_path / "rows.jsonl")], output=tmp_path / "t", options=TokenizerOptions(vocab_size=600)
    )
    long = [
        piece
        for piece, number in load_tokenizer(tmp_path / "t").get_vocab().items()
        if number >= FIRST_PIECE and len(piece) > 1
    ]
    assert long == ["日月"]
    assert report.rows_used == 1


def test_unigram_chooses_among_more_pieces_than_it_keeps(rows, tmp_path):
    for kind in KINDS:
        train_tokenizer([rows], output=tmp_path / kind, options=TokenizerOptions(vocab_size=900, kind=kind))
    bpe, unigram = (set(load_tokenizer(tmp_path / kind).get_vocab()) for kind in KINDS)
    assert len(bpe) == len(unigram) == 900
    assert bpe != unigram


def test_another_seed_holds_out_other_rows(rows, tmp_path):
    fits = [
        train_tokenizer([rows], output=tmp_path / str(seed), options=TokenizerOptions(vocab_size=700, seed=seed)).total
        for seed in (0, 1)
    ]
    assert fits[0] != fits[1]


def test_ctrl_c_stops_the_reading_of_texts(rows, tmp_path, monkeypatch):
    def endless(given, alphabet):
        def batches():
            while True:
                time.sleep(0.01)
                yield ["天地玄黄"]

        return batches

    def interrupt(phrase):
        if "training on" in phrase:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "without_rare", endless)
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer([rows], output=tmp_path / "t", options=TokenizerOptions(vocab_size=700), progress=interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name == "brimful-tokenizer"]
    assert not list(tmp_path.iterdir())


def test_bytes_and_characters_are_counted_by_field(tokenizer):
    rows = pa.table({"prompt": ["龘龘", "ﬁ"], "response": ["", "2024"]})
    fits = measure(tokenizer, rows)
    assert (fits["prompt"].rows, fits["prompt"].characters, fits["prompt"].byte_tokens) == (2, 4, 6)
    assert (fits["response"].characters, fits["response"].tokens, fits["response"].byte_tokens) == (4, 4, 0)


def test_progress_is_shown_during_a_long_call():
    seconds = []
    assert call_in_thread(lambda stop: time.sleep(0.6) or 42, seconds.append) == 42
    assert len(seconds) >= 2 and seconds == sorted(seconds)


def test_an_error_of_a_long_call_is_raised():
    with pytest.raises(ZeroDivisionError):
        call_in_thread(lambda stop: 1 / 0, lambda seconds: None)


def test_a_tokenizer_that_loses_text_is_not_saved(rows, tmp_path, monkeypatch):
    def spoilt(*args, **options):
        tokenizer = original(*args, **options)
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    original = training.train_bpe
    monkeypatch.setattr(training, "train_bpe", spoilt)
    with pytest.raises(InternalError, match="the tokenizer turns"):
        train_tokenizer([rows], output=tmp_path / "t", options=TokenizerOptions(vocab_size=600))
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_is_kept_unless_overwrite_is_given(tmp_path):
    rows = write_rows(tmp_path / "rows.parquet", 60)

    def train(**options):
        train_tokenizer([rows], output=tmp_path / "t", options=TokenizerOptions(**options))
        return (tmp_path / "t" / "tokenizer.json").read_bytes()

    before = train(vocab_size=600)
    with pytest.raises(BadOption, match="is an existing tokenizer. Try: another folder, or overwrite=True"):
        train(vocab_size=650)
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() == before
    assert train(vocab_size=650, overwrite=True) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet", "t"]


def test_a_place_that_cannot_be_written_to_is_refused_before_any_reading(rows, tmp_path):
    (tmp_path / "file").write_text("")
    phrases = []
    with pytest.raises(BadData, match="Not a directory. Try: another output="):
        train_tokenizer([rows], output=tmp_path / "file" / "t", progress=phrases.append)
    assert not phrases


def test_a_full_disk_is_one_sentence_and_leaves_nothing(rows, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("brimful.data.tokenizer.folder.write_atomic", full)
    with pytest.raises(BadData, match="the disk is full. Try: free some space"):
        train_tokenizer([rows], output=tmp_path / "t", options=TokenizerOptions(vocab_size=600))
    assert not list(tmp_path.iterdir())


def test_a_link_is_followed(tmp_path, rows):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    train_tokenizer([rows], output=tmp_path / "link", options=TokenizerOptions(vocab_size=600))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "tokenizer.json").is_file()


def test_an_output_among_the_rows_is_refused(tmp_path):
    write_rows(tmp_path / "rows.parquet", 20)
    with pytest.raises(BadOption, match="inside"):
        train_tokenizer([str(tmp_path)], output=tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
