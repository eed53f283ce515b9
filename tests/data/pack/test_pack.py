"""Packing: the right tokens, every row accounted for, nothing but a whole store at the output."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, trainers

from brimful.data import encode as pack_encode
from brimful.data import tokenize as pack_module
from brimful.data.encode import PIECES_IN_FLIGHT, PackOptions, piece_size, pieces
from brimful.data.store import Store
from brimful.data.tokenize import pack
from brimful.errors import BadData, BadOption
from brimful.machine.host import Space
from brimful.units import GiB, MiB

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


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture(scope="session")
def plain(tokenizer):
    """Text to ids, one at a time, by the library alone."""
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    loaded.no_truncation()
    loaded.encode_special_tokens = True
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def packed(tmp_path, content, tokenizer, **options):
    source = write_jsonl(tmp_path / "rows.jsonl", content)
    report = pack([source], tokenizer=tokenizer, output=tmp_path / "store", options=PackOptions(**options))
    return report, Store.open(tmp_path / "store")


def test_every_side_is_its_text_and_one_eos(tmp_path, tokenizer, plain):
    content = rows(50)
    _, store = packed(tmp_path, content, tokenizer)
    for row, wanted in zip(store, content, strict=True):
        assert row["prompt"].tolist() == [*plain(wanted["prompt"]), 1]
        assert row["response"].tolist() == [*plain(wanted["response"]), 1]
        assert (row["prompt"] == 1).sum() == (row["response"] == 1).sum() == 1


def test_small_pieces_give_the_same_store(tmp_path, tokenizer, monkeypatch):
    content = rows(300)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    one, _ = packed(tmp_path / "a", content, tokenizer)
    monkeypatch.setattr(pack_module, "piece_size", lambda *_: 500)
    other, _ = packed(tmp_path / "b", content, tokenizer)
    assert one.fingerprint == other.fingerprint
    assert one.sides == other.sides


def test_a_text_and_a_preference_have_one_and_three_sides(tmp_path, tokenizer, plain):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "text.parquet")
    pack([str(tmp_path / "text.parquet")], tokenizer=tokenizer, output=tmp_path / "one")
    assert [row["text"].tolist() for row in Store.open(tmp_path / "one")] == [[*plain(text), 1] for text in TEXTS]
    pq.write_table(pa.table({"prompt": TEXTS, "chosen": TEXTS[::-1], "rejected": TEXTS}), tmp_path / "three.parquet")
    pack([str(tmp_path / "three.parquet")], tokenizer=tokenizer, output=tmp_path / "three")
    three = Store.open(tmp_path / "three")
    assert three.sides == ("prompt", "chosen", "rejected")
    assert three[0]["chosen"].tolist() == [*plain(TEXTS[-1]), 1]


def test_over_long_sides_are_cut_and_counted(tmp_path, tokenizer, plain):
    content = rows(40)
    report, store = packed(tmp_path, content, tokenizer, max_tokens=(8, 12))
    for side, limit in (("prompt", 8), ("response", 12)):
        ids = [plain(row[side]) for row in content]
        over = [len(one) + 1 - limit for one in ids if len(one) + 1 > limit]
        assert over
        assert [row[side].tolist() for row in store] == [[*one[: limit - 1], 1] for one in ids]
        assert (report.sides[side].truncated, report.sides[side].lost_tokens) == (len(over), sum(over))
        assert store.meta.truncated[side] == len(over)
        assert store.meta.max_tokens[side] == report.sides[side].max_tokens == limit
        assert report.sides[side].longest == limit
    assert report.requested_max_tokens == (8, 12)


def test_a_side_exactly_at_its_limit_is_not_cut(tmp_path, tokenizer, plain):
    content = [{"prompt": "一", "response": TEXTS[0]}]
    limit = len(plain(TEXTS[0])) + 1
    report, _ = packed(tmp_path, content, tokenizer, max_tokens=(limit,))
    assert report.to_json()["truncated"] == {"prompt": 0, "response": 0}


def test_rows_with_an_empty_side_are_dropped_and_counted(tmp_path, tokenizer):
    empties = [("", "a"), ("a", ""), (" \n\u3000", "a"), ("a", "∅"), ("∅∅", "a")]
    content = rows(6) + [{"prompt": prompt, "response": response} for prompt, response in empties] + rows(4, 6)
    report, store = packed(tmp_path, content, tokenizer)
    assert (report.rows_in, report.rows_out) == (15, 10) == (store.meta.rows_in, len(store))
    assert report.dropped == store.meta.dropped == {"broken": 0, "empty": 5}
    assert report.sides["prompt"].characters == sum(len(row["prompt"]) for row in rows(10))


def test_a_broken_row_ends_it_with_file_and_line(tmp_path, tokenizer):
    write_jsonl(tmp_path / "rows.jsonl", rows(20))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(BadData, match="rows.jsonl, line 21"):
        pack([str(tmp_path / "rows.jsonl")], tokenizer=tokenizer, output=tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_broken_rows_within_max_bad_are_dropped_and_counted(tmp_path, tokenizer):
    write_jsonl(tmp_path / "rows.jsonl", rows(20))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{broken\n")
    options = PackOptions(max_bad=0.1)
    report = pack([str(tmp_path / "rows.jsonl")], tokenizer=tokenizer, output=tmp_path / "store", options=options)
    assert (report.rows_in, report.rows_out, report.dropped) == (21, 20, {"broken": 1, "empty": 0})
    assert "rows.jsonl, line 21" in report.first_broken
    with pytest.raises(BadData, match="more than --max-bad 0.01"):
        pack(
            [str(tmp_path / "rows.jsonl")],
            tokenizer=tokenizer,
            output=tmp_path / "other",
            options=PackOptions(max_bad=0.01),
        )
    assert not (tmp_path / "other").exists()


def test_no_row_left_is_told(tmp_path, tokenizer):
    with pytest.raises(BadData, match="no row is left to pack: of 3 rows 0 are broken and 3 have an empty side"):
        packed(tmp_path, [{"prompt": "", "response": "a"}] * 3, tokenizer)
    assert not (tmp_path / "store").exists()


def test_the_report_adds_up(tmp_path, tokenizer):
    report, store = packed(tmp_path, rows(30), tokenizer)
    content = json.loads(json.dumps(report.to_json()))
    assert {
        "rows_in", "rows_out", "dropped", "columns", "truncated", "tokens", "seconds", "peak_bytes", "lengths", "characters",
    } <= set(content)  # fmt: skip
    assert content["rows_in"] == content["rows_out"] + sum(content["dropped"].values())
    assert content["tokens"] == {side: sum(len(row[side]) for row in store) for side in store.sides}
    assert content["columns"] == {"prompt": "prompt", "response": "response"}
    lengths = sorted(len(row["response"]) for row in store)
    assert content["lengths"]["response"] == {
        "mean": pytest.approx(sum(lengths) / 30), "p50": lengths[14], "p90": lengths[26], "p99": lengths[29], "longest": lengths[-1],
    }  # fmt: skip
    assert content["peak_bytes"] >= content["start_bytes"] > MiB
    assert content["size_bytes"] == sum(
        path.stat().st_size for path in store.path.rglob("*.*") if path.name != "store.json"
    )


def test_the_store_knows_its_tokenizer_and_sources(tmp_path, tokenizer):
    _, store = packed(tmp_path, rows(3), tokenizer)
    assert (store.meta.eos_id, store.meta.pad_id) == (1, 0)
    assert store.meta.sources == (str(tmp_path / "rows.jsonl"),)
    copied = store.path / "tokenizer"
    assert sorted(path.name for path in copied.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert (copied / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_a_very_long_text_gives_the_same_tokens_from_its_beginning(tmp_path, tokenizer, monkeypatch, plain):
    monkeypatch.setattr(pack_encode, "LONG_CHARACTERS", 60)
    long, short_of_tokens = TEXTS[0] * 40, "what a day, " * 40
    content = [{"prompt": long, "response": long}, {"prompt": "一", "response": short_of_tokens}]
    report, store = packed(tmp_path, content, tokenizer, max_tokens=(6,))
    assert [row["response"].tolist() for row in store] == [[*plain(row["response"])[:5], 1] for row in content]
    assert report.sides["prompt"].truncated == 1
    (tmp_path / "all").mkdir()
    _, store = packed(tmp_path / "all", content, tokenizer, max_tokens=(100_000,))
    assert [row["response"].tolist() for row in store] == [[*plain(row["response"]), 1] for row in content]


def test_pieces_are_cut_by_size_and_lose_no_row():
    texts = ["x" * size for size in (3, 50, 1, 1, 1, 200, 1, 0, 9, 9)]
    batch = pa.record_batch({"prompt": texts, "response": texts})
    cut = list(pieces(batch, piece_bytes=20))
    assert pa.Table.from_batches(cut).to_pylist() == batch.to_pylist()
    assert all(piece.num_rows for piece in cut)
    assert (
        max(sum(len(text) for row in piece.to_pylist() for text in row.values()) for piece in cut if piece.num_rows > 1)
        <= 406
    )
    assert [piece.num_rows for piece in pieces(batch.slice(0, 0), piece_bytes=20)] == [0]
    assert [piece.num_rows for piece in pieces(batch, piece_bytes=10**9)] == [10]
    assert max(piece.num_rows for piece in pieces(pa.record_batch({"text": ["x" * 10] * 100}), piece_bytes=50)) == 5


def test_the_host_limit_decides_the_size_of_pieces():
    assert piece_size(GiB, 64 * MiB) == pack_encode.PIECE_BYTES
    tight = piece_size(200 * MiB, 64 * MiB)
    assert tight < pack_encode.PIECE_BYTES
    assert 64 * MiB + PIECES_IN_FLIGHT * tight < 200 * MiB
    with pytest.raises(BadOption, match="--host-limit 100MiB is too small: .* take 64 MiB .*; give 1.*MiB or more"):
        piece_size(100 * MiB, 64 * MiB)


def test_a_host_limit_too_small_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(BadOption, match="--host-limit 1MiB is too small"):
        packed(tmp_path, rows(3), tokenizer, host_limit_bytes=MiB)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_all_wrong_options_are_told_at_once():
    with pytest.raises(BadOption, match="--max-tokens 1: .*; --max-bad 2: .*; --host-limit 0: "):
        PackOptions(max_tokens=(1,), max_bad=2, host_limit_bytes=0)


def test_one_limit_for_each_side_or_one_for_all(tmp_path, tokenizer):
    with pytest.raises(BadOption, match="--max-tokens 8,8,8: the rows have 2 sides"):
        packed(tmp_path, rows(3), tokenizer, max_tokens=(8, 8, 8))


def test_a_disk_too_small_is_told_before_it_is_full(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(Space, "around", lambda path: Space(path=str(path), total_bytes=10**9, free_bytes=100))
    with pytest.raises(BadData, match="will take about .* and the disk has 100 B free"):
        packed(tmp_path, rows(30), tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_progress_tells_rows_rate_and_share(tmp_path, tokenizer):
    said = []
    source = write_jsonl(tmp_path / "rows.jsonl", rows(30))
    pack([source], tokenizer=tokenizer, output=tmp_path / "store", progress=said.append)
    assert len(said) == 1
    assert said[0].startswith("packed 30 rows, ")
    assert said[0].endswith("rows/s, 100%")


def test_a_cut_takes_the_end_or_where_asked_the_beginning(tmp_path, tokenizer, plain):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abcdefgh" * 4, "response": "abcdefgh" * 4}])
    whole = plain("abcdefgh" * 4)
    options = PackOptions(max_tokens=(6,), keep_end=("prompt",))
    report = pack([str(source)], tokenizer=tokenizer, output=tmp_path / "store", options=options)
    row = Store.open(tmp_path / "store")[0]
    assert len(whole) > 6
    assert row["prompt"].tolist() == [*whole[-5:], 1] and row["response"].tolist() == [*whole[:5], 1]
    assert report.sides["prompt"].keeps_end and not report.sides["response"].keeps_end


def test_the_prompt_of_a_conversation_keeps_its_end(tmp_path, tokenizer, plain):
    turns = [{"from": "human", "value": "abcdefgh" * 6}, {"from": "gpt", "value": "abc"}]
    source = write_jsonl(tmp_path / "rows.jsonl", [{"conversations": turns}])
    whole = plain("abcdefgh" * 6)
    pack([str(source)], tokenizer=tokenizer, output=tmp_path / "store", options=PackOptions(max_tokens=(6,)))
    assert Store.open(tmp_path / "store")[0]["prompt"].tolist() == [*whole[-5:], 1]


def test_a_side_that_is_not_there_cannot_keep_its_end(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    with pytest.raises(BadOption, match="--keep-end question: the rows have the sides prompt, response"):
        options = PackOptions(keep_end=("question",))
        pack([str(source)], tokenizer=tokenizer, output=tmp_path / "store", options=options)
