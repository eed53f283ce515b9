"""`data check --model`: rows go through the model's template, and everything that happens to them is counted."""

import io
import json

import pytest
from rich.console import Console

from brimful.cli import main
from brimful.data.store import Store
from brimful.errors import BadOption
from brimful.languages import set_language, translate
from brimful.report.data_tables import rows_table
from brimful.tasks.causal_data import FOUND_BY
from brimful.tasks.check_rows import _packed_tokens, check_rows
from brimful.tasks.load import load_task
from tests.tasks.tiny import write_jsonl
from tests.tasks.tiny_causal import CONVERSATIONS, talk


def shown(report):
    console = Console(file=io.StringIO(), width=160)
    console.print(rows_table(report))
    return console.file.getvalue()


def test_tokens_lengths_and_trained_shares_are_those_of_the_store(causal):
    report = check_rows([str(causal.raw)], model=str(causal.model))
    lengths = [len(row["tokens"]) for row in causal.store]
    assert (report.rows_in, report.rows_out, report.tokens) == (24, 24, sum(lengths))
    assert report.trained_tokens == sum(int(row["spans"][1::2].sum()) for row in causal.store)
    assert report.lengths["longest"] == max(lengths) and report.dropped == {} and report.failure() is None


def test_percentiles_are_those_of_data_tokenize(causal, tmp_path, capsys):
    """The 99th of one file was its longest row in one command, and the one before in the other."""
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk("问？", "红花" * count)} for count in range(1, 31)])
    report = check_rows([str(rows)], model=str(causal.model))
    tokenized(rows, causal.model, tmp_path / "store", "--json")
    of_store = json.loads(capsys.readouterr().out)["lengths"]["tokens"]
    assert {name: of_store[name] for name in report.lengths if name != "mean"} == {
        name: value for name, value in report.lengths.items() if name != "mean"
    }


@pytest.mark.parametrize("method", FOUND_BY.values())
def test_how_replies_are_found_is_told_in_chinese(method):
    set_language("zh")
    text = translate(f"columns: found messages; replies found by: {method}")
    set_language(None)
    assert method not in text


def test_trained_tokens_stand_out(causal):
    report = check_rows([str(causal.raw)], model=str(causal.model))
    assert ("红色。[EOS]", True) in report.examples[0]
    assert "⟦红色。[EOS]⟧" in shown(report) and "甲的花" in shown(report)


def test_tokens_lost_to_the_limit_are_counted(causal):
    report = check_rows([str(causal.raw)], model=str(causal.model), max_tokens=30)
    lengths = [len(row["tokens"]) for row in causal.store]
    longer = [length for length in lengths if length > 30]
    assert report.truncated + report.dropped.get("nothing to train on", 0) == len(longer)
    assert 0 < report.lost_tokens <= sum(length - 30 for length in longer)


def test_rows_that_cannot_be_used_are_named(causal, tmp_path):
    rows = [{"messages": one} for one in (*CONVERSATIONS[:3], talk("问？"), talk("问？", ""))]
    report = check_rows([str(write_jsonl(tmp_path / "rows.jsonl", rows))], model=str(causal.model))
    assert sum(report.dropped.values()) == 2 and "rows.jsonl" in report.failure()
    assert [one.line for problems in report.problems.values() for one in problems] == [4, 5]


def test_what_the_template_was_not_asked_is_not_called_refused_by_it(causal, tmp_path):
    rows = [{"messages": one} for one in (CONVERSATIONS[0], talk("问？", ""))]
    report = check_rows([str(write_jsonl(tmp_path / "rows.jsonl", rows))], model=str(causal.model))
    assert str(report.problems["invalid"][0]).endswith("line 2: the reply in message 2 is empty")


def test_each_cause_is_shown_once_for_the_same_reason(causal, tmp_path):
    narrated = [{"role": "narrator", "content": "x"}, *talk("问？", "答。")]
    rows = [{"messages": one} for one in (CONVERSATIONS[0], [], [], narrated)]
    report = check_rows([str(write_jsonl(tmp_path / "rows.jsonl", rows))], model=str(causal.model))
    assert [one.line for one in report.problems["broken"]] == [2, 4]
    text = " ".join(shown(report).split())
    assert "line 2: 'messages' has no message; line 4: " in text and "narrator" in text


def test_rows_that_came_before_are_counted_and_kept(causal, tmp_path):
    rows = [{"messages": CONVERSATIONS[number]} for number in (0, 1, 0, 2, 0)]
    report = check_rows([str(write_jsonl(tmp_path / "rows.jsonl", rows))], model=str(causal.model))
    assert (report.repeated, report.rows_out) == (2, 5)
    text = shown(report)
    assert "2 rows like an earlier one" in text and "rows.jsonl, line 3" in "".join(text.split("\n")).replace("  ", "")


def test_one_row_that_is_dropped_or_truncated_is_no_plural(causal, tmp_path):
    rows = [{"messages": one} for one in (CONVERSATIONS[0], talk("问？", "答" * 900), talk("问？", ""))]
    text = shown(check_rows([str(write_jsonl(tmp_path / "rows.jsonl", rows))], model=str(causal.model), max_tokens=64))
    assert "1 row is longer than 64 tokens and loses " in text and "1 row, invalid" in text


@pytest.mark.parametrize(("lengths", "tokens"), [([10, 10, 10], 30), ([60, 50, 40, 50], 200), ([70, 60, 50], 250)])
def test_the_tokens_of_packed_micro_batches(lengths, tokens):
    import numpy as np

    assert _packed_tokens(np.array(lengths), 100) == tokens


def test_packing_wastes_less_than_padding(causal):
    packing = check_rows([str(causal.raw)], model=str(causal.model)).packing
    assert packing.unsorted <= packing.sorted <= packing.packed <= 1


def test_new_weights_have_no_tokenizer(causal):
    with pytest.raises(BadOption, match="has new weights and no tokenizer yet"):
        check_rows([str(causal.raw)], model="causal-tiny")


def test_the_command(causal, capsys):
    main(["data", "check", str(causal.raw), "--model", str(causal.model), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows_out"] == 24 and answer["examples"][0][-1]["trained"] is True


def test_an_encoder_decoder_has_plain_texts_checked_with_its_tokenizer(tiny, capsys):
    main(["data", "check", str(tiny.raw), "--model", str(tiny.model), "--json"])
    assert json.loads(capsys.readouterr().out)["tokens"]["prompt"]["rows"] == 24


def test_texts_are_checked_as_for_pretraining(causal, tmp_path):
    raw = write_jsonl(tmp_path / "texts.jsonl", [{"text": "红色的花，" * 30}, {"text": "车"}])
    report = check_rows([str(raw)], model=str(causal.model), max_tokens=32)
    assert report.trained_tokens == report.tokens and report.rows_out > 3 and report.method == "all tokens"


PAIRS = [
    {"prompt": "甲的花？", "chosen": "红色。", "rejected": "白色。"},
    {"prompt": "乙的花？", "chosen": "红色。", "rejected": "红色。 "},
    {"prompt": "丙的花？", "chosen": "", "rejected": "白色。"},
    {"prompt": "丁的花？", "chosen": "绿色。", "rejected": "白色。"},
]


@pytest.mark.parametrize("kind", ["tiny", "causal"])
def test_pairs_are_checked_as_dpo_reads_them(kind, request, tmp_path):
    model = request.getfixturevalue(kind).model
    report = check_rows([str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))], model=str(model))
    assert (report.rows_in, report.rows_out) == (4, 2)
    assert report.dropped == {"with equal replies": 1, "empty": 1}
    assert str(report.problems["with equal replies"][0]).endswith("line 2: chosen is equal to rejected")
    assert str(report.problems["empty"][0]).endswith("line 3: chosen is empty")
    assert report.packing is None and report.failure() is None


def test_pairs_are_shown_with_the_names_of_their_parts(causal, tmp_path):
    report = check_rows([str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))], model=str(causal.model))
    assert [name for _, name in report.examples[0]] == ["prompt", "chosen", "rejected"]
    lines = [line.split() for line in shown(report).splitlines()]
    assert ["chosen", "红色。[EOS]"] in lines and ["rejected", "白色。[EOS]"] in lines


def test_pairs_may_be_whole_conversations(causal, tmp_path):
    rows = [{"chosen": talk("甲的花？", "红色。"), "rejected": talk("甲的花？", "白色。")}]
    report = check_rows([str(write_jsonl(tmp_path / "pairs.jsonl", rows))], model=str(causal.model))
    assert report.rows_out == 1 and report.examples[0][1] == ("红色。[EOS]", "chosen")


@pytest.mark.parametrize("kind", ["tiny", "causal"])
def test_the_command_checks_pairs_for_a_model_and_counts_shared_prompts(kind, request, tmp_path, capsys):
    pairs = str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))
    valid = str(write_jsonl(tmp_path / "valid.jsonl", [{**PAIRS[0], "prompt": "戊的花？"}, PAIRS[3]]))
    model = str(request.getfixturevalue(kind).model)
    main(["data", "check", pairs, "--model", model, "--valid", valid, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["rows_out"] == 2
    shared = content["shared_prompts"]
    assert (shared["rows"], shared["shared"], shared["first"]["line"]) == (2, 1, 2)


# ── data tokenize --model ─────────────────────────────────────────────────────────────────────────────────────────────


def tokenized(source, model, store, *flags):
    """The limit counts the whole process, which after many tests holds more than the default."""
    command = ["data", "tokenize", str(source), "--model", str(model), "--output", str(store), "--host-limit", "8GiB"]
    main([*command, *flags])
    return store


@pytest.fixture
def files(causal, tmp_path):
    """By task, rows that it trains on."""
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "红色的花，" * 30}, {"text": "车"}])
    return {"sft": causal.raw, "pretrain": texts, "dpo": write_jsonl(tmp_path / "pairs.jsonl", PAIRS)}


@pytest.mark.parametrize("kind", ["sft", "pretrain", "dpo"])
def test_a_store_that_is_made_for_a_model_has_the_rows_of_training(causal, files, tmp_path, kind):
    store = tokenized(files[kind], causal.model, tmp_path / "store")
    task = load_task(kind, {"model": str(causal.model)})
    rows = task.rows(task.prepare(str(store), tmp_path / "run", print))
    assert rows.fingerprint == task.rows(task.prepare(str(files[kind]), tmp_path / "run", print)).fingerprint


def test_a_store_has_the_template_and_the_marks_that_were_asked_for(causal, files, tmp_path):
    folder = causal.without_template(tmp_path / "model")
    flags = ["--chat-template", "plain", "--train-on", "all", "--max-tokens", "40"]
    tokenized(files["sft"], folder, tmp_path / "store", *flags)
    store = Store.open(tmp_path / "store")
    assert "Assistant:" in (store.path / "tokenizer" / "chat_template.jinja").read_text()
    assert store.longest == (40,) and all(row["spans"].tolist() == [0, len(row["tokens"])] for row in store)


def test_an_encoder_decoder_gets_the_store_of_its_tokenizer(tiny, tmp_path):
    store = tokenized(tiny.raw, tiny.model, tmp_path / "store")
    task = load_task("sft", {"model": str(tiny.model)})
    rows = task.rows(task.prepare(str(store), tmp_path / "run", print))
    assert rows.fingerprint == task.rows(task.prepare(str(tiny.raw), tmp_path / "run", print)).fingerprint


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "One of --model and --tokenizer is needed"),
        (["--model", "m", "--tokenizer", "t"], "One of --model and --tokenizer is needed"),
        (["--tokenizer", "t", "--train-on", "all"], "--train-on needs --model with a causal model"),
        (["--model", "MODEL", "--keep-end", "prompt"], "--keep-end is for the fields of an encoder-decoder"),
    ],
)
def test_flags_that_cannot_work_are_refused(causal, capsys, flags, message):
    flags = [str(causal.model) if flag == "MODEL" else flag for flag in flags]
    with pytest.raises(SystemExit, match="2"):
        main(["data", "tokenize", str(causal.raw), "--output", "store", *flags])
    assert message in capsys.readouterr().err
