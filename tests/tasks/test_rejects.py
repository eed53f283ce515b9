"""Rejected answers: the same in any batch and after any interruption, filtered and counted, for both architectures."""

import json
import os
import signal
import subprocess
import sys

import pytest

from brimful.data.read.source import open_source
from brimful.errors import BadData, BadModel, BadOption, DoesNotFit
from brimful.files import FileLock
from brimful.tasks import rejects
from brimful.tasks.generate import Generator
from brimful.tasks.reject_filter import REASONS, is_off_topic, reason_to_drop, similarity
from brimful.tasks.reject_prompts import Prompter, pair_of
from brimful.tasks.rejects import RejectsOptions, make_rejects
from brimful.units import KiB
from tests.tasks.adapted import add_noise
from tests.tasks.tiny import ROWS, learn, make_model, save, write_jsonl
from tests.tasks.tiny_causal import CONVERSATIONS, SYSTEM, talk

HOT = {"temperature": 1.5, "max_new_tokens": 12, "device": "cpu", "max_similarity": 0.95}
"""The models know their rows by heart, so only heat makes them say something else."""


def options(**changes):
    return RejectsOptions(**{**HOT, **changes})


def make(model, data, output, progress=lambda phrase: None, **changes):
    return make_rejects(str(model), str(data), output=output, options=options(**changes), progress=progress)


def written(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(params=["encoder-decoder", "causal"])
def chat(request, tiny, causal):
    return tiny if request.param == "encoder-decoder" else causal


@pytest.fixture
def unfiltered(monkeypatch):
    """Every answer is kept, so that files which are equal say something about all of them."""
    monkeypatch.setattr(rejects, "reason_to_drop", lambda *texts, **limits: None)


# ── Rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_questions_give_rows_of_texts(tiny, tmp_path):
    report = make(tiny.model, tiny.raw, tmp_path / "pairs.jsonl")
    rows, known = written(tmp_path / "pairs.jsonl"), {row["prompt"]: row["response"] for row in ROWS}
    assert 0 < len(rows) == report.rows_out and report.form == "texts"
    for row in rows:
        assert set(row) == {"prompt", "chosen", "rejected"}
        assert known[row["prompt"]] == row["chosen"] != row["rejected"]
    assert report.rows_in == 24 == report.rows_out + sum(report.dropped.values())
    assert set(report.dropped) == set(REASONS)
    assert [row["prompt"] for row in rows] == [one for one in known if one in {row["prompt"] for row in rows}], (
        "in order"
    )


def test_pairs_are_read_as_preferences(tiny, tmp_path):
    make(tiny.model, tiny.raw, tmp_path / "pairs.jsonl")
    source = open_source([str(tmp_path / "pairs.jsonl")])
    assert source.layout.fields == ("prompt", "chosen", "rejected")
    chunk = next(source.chunks())
    assert chunk.rows.to_pylist() == written(tmp_path / "pairs.jsonl") and not chunk.broken


def test_conversations_give_rows_of_messages(causal, tmp_path):
    """The last reply is the chosen one. A conversation may have other replies, and a system message."""
    report = make(causal.model, causal.raw, tmp_path / "pairs.jsonl", temperature=2.5)
    rows, known = written(tmp_path / "pairs.jsonl"), [(one[:-1], one[-1:]) for one in CONVERSATIONS]
    assert report.form == "conversations" and rows
    for row in rows:
        assert set(row) == {"prompt", "chosen", "rejected"}
        assert (row["prompt"], row["chosen"]) in known
        assert [one["role"] for one in row["rejected"]] == ["assistant"]
        assert row["rejected"][0]["content"] != row["chosen"][0]["content"]
    assert any(len(row["prompt"]) == 3 for row in rows) and report.rows_in == 24


def test_conversations_of_single_questions_are_texts(causal, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": one} for one in CONVERSATIONS if len(one) == 2])
    assert make(causal.model, data, tmp_path / "pairs.jsonl").form == "texts"


def test_tools_stay_with_their_conversation():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    pair = pair_of(0, "rows.jsonl", 1, talk("一？", "二。"), tools)
    assert not pair.is_question
    assert pair.output("三。", "conversations") == {
        "prompt": talk("一？"), "chosen": talk("", "二。")[1:], "rejected": talk("", "三。")[1:], "tools": tools,
    }  # fmt: skip


def test_answers_are_those_of_the_model(chat, tmp_path):
    """Without sampling it says what it has learned, which is no rejected answer."""
    with pytest.raises(BadData, match=r"no row is left of 24 \(24 identical to the chosen answer\)"):
        make(chat.model, chat.raw, tmp_path / "pairs.jsonl", temperature=0)
    assert not (tmp_path / "pairs.jsonl").exists()


def test_an_encoder_decoder_reads_all_messages_one_below_the_other(tiny):
    conversation = talk("一？", "二。", "三？", "四。", system=SYSTEM)
    pair = pair_of(0, "rows.jsonl", 1, conversation, [])
    assert pair.prompt_text == f"{SYSTEM}\n一？\n二。\n三？" and not pair.is_question
    prompter = Prompter(str(tiny.model))
    assert prompter.tokens(pair) == (prompter.tokenizer.encode(pair.prompt_text), False)


def test_a_long_prompt_keeps_its_end(tiny):
    pair = pair_of(0, "rows.jsonl", 1, talk("甲" + "花" * 300 + "乙", "红。"), [])
    prompter = Prompter(str(tiny.model))
    tokens, truncated = prompter.tokens(pair)
    assert truncated and tokens == prompter.tokenizer.encode(pair.prompt_text)[-256:]


def test_a_causal_model_is_asked_through_its_template(causal):
    prompter = Prompter(str(causal.model))
    pair = pair_of(0, "rows.jsonl", 1, CONVERSATIONS[2], [])
    assert prompter.tokens(pair) == (causal.template.prompt(CONVERSATIONS[2][:-1]), False)
    assert prompter.end_ids == causal.template.end_ids


def test_the_rows_that_are_chosen_follow_the_seed_and_keep_their_answers(tiny, tmp_path):
    """A prompt has the same answer whichever others are asked."""
    every = make(tiny.model, tiny.raw, tmp_path / "all.jsonl")
    some = [make(tiny.model, tiny.raw, tmp_path / f"{name}.jsonl", rows=10) for name in "ab"]
    whole, few = written(tmp_path / "all.jsonl"), written(tmp_path / "a.jsonl")
    assert few and all(row in whole for row in few)
    assert few == written(tmp_path / "b.jsonl")
    assert (some[0].answers, some[0].not_chosen, every.answers) == (10, 14, 24)
    make(tiny.model, tiny.raw, tmp_path / "c.jsonl", rows=10, seed=1)
    assert written(tmp_path / "c.jsonl") != few


# ── Memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_any_memory_limit_gives_the_same_file(chat, tmp_path, unfiltered):
    weights = sum(one.nbytes for one in chat.net.parameters())
    reports = [
        make(chat.model, chat.raw, tmp_path / f"{number}.jsonl", memory_limit=limit, temperature=2.0)
        for number, limit in enumerate(["1GiB", weights + 600 * KiB, weights + 250 * KiB])
    ]
    files = [(tmp_path / f"{number}.jsonl").read_bytes() for number in range(3)]
    assert files[0] == files[1] == files[2]
    rows = written(tmp_path / "0.jsonl")
    assert len(rows) == 24 and sum(row["chosen"] != row["rejected"] for row in rows) > 12, (
        "greedy answers are always the same"
    )
    batches = [report.forward["batches"] for report in reports]
    assert batches[0] == 1 < batches[1] < batches[2]
    assert reports[2].peak_bytes <= weights + 250 * KiB and reports[2].forward["ooms"] == 0


def test_the_windows_do_not_matter_either(chat, tmp_path, monkeypatch, unfiltered):
    make(chat.model, chat.raw, tmp_path / "one.jsonl", temperature=2.0)
    monkeypatch.setattr(rejects, "WINDOW_ROWS", 7)
    report = make(chat.model, chat.raw, tmp_path / "four.jsonl", temperature=2.0)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "four.jsonl").read_bytes()
    assert report.forward["batches"] == 4


def test_out_of_memory_is_survived_with_the_same_answers(chat, tmp_path, monkeypatch, unfiltered):
    """The probes are replaced by the smallest one, so the memory model predicts too little."""
    make(chat.model, chat.raw, tmp_path / "plain.jsonl", temperature=2.0)
    dummy, notes = Generator.dummy, []
    monkeypatch.setattr(Generator, "dummy", lambda self, rows, shape: dummy(self, 1, (2, 1)))
    limit = sum(one.nbytes for one in chat.net.parameters()) + 250 * KiB
    report = make(chat.model, chat.raw, tmp_path / "tight.jsonl", notes.append, memory_limit=limit, temperature=2.0)
    assert (tmp_path / "tight.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert report.forward["ooms"] > 0 and any("out of memory" in note for note in notes)


def test_a_prompt_that_does_not_fit_alone_is_named(tiny, tmp_path):
    weights = sum(one.nbytes for one in tiny.net.parameters())
    with pytest.raises(DoesNotFit, match="does not fit"):
        make(tiny.model, tiny.raw, tmp_path / "pairs.jsonl", memory_limit=weights + 8 * KiB)
    with pytest.raises(DoesNotFit, match="the model alone does not fit"):
        make(tiny.model, tiny.raw, tmp_path / "pairs.jsonl", memory_limit=weights // 2)
    assert list(tmp_path.iterdir()) == []


# ── Interruptions ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Interrupted(Exception):
    pass


def interrupt_after(monkeypatch, batches):
    """The run fails when it begins another batch than these."""
    answer_batch, count = Generator.answer_batch, 0

    def answer(self, prompts):
        nonlocal count
        count += 1
        if count > batches:
            raise Interrupted
        return answer_batch(self, prompts)

    monkeypatch.setattr(Generator, "answer_batch", answer)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(rejects, "max_rows", lambda device: 5)


def test_an_interrupted_run_continues_with_the_same_file(chat, tmp_path, monkeypatch, small_batches, unfiltered):
    make(chat.model, chat.raw, tmp_path / "whole.jsonl", temperature=2.0)
    output, notes = tmp_path / "pairs.jsonl", []
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(Interrupted):
            make(chat.model, chat.raw, output, temperature=2.0)
    assert not output.exists() and (tmp_path / ".pairs.jsonl.part").is_dir()
    report = make(chat.model, chat.raw, output, notes.append, temperature=2.0)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert 0 < report.resumed_answers < 24 and report.answers == 24
    assert f"continuing after {report.resumed_answers:,} answers of an interrupted run" in notes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "whole.jsonl"]


def test_a_resumed_run_has_the_batches_of_one_that_was_not_interrupted(chat, tmp_path, monkeypatch, small_batches):
    """Those with other prompts would differ by rounding."""
    answer_batch, batches = Generator.answer_batch, []

    def recorded(self, prompts):
        batches.append([list(prompt) for prompt in prompts])
        return answer_batch(self, prompts)

    monkeypatch.setattr(Generator, "answer_batch", recorded)
    make(chat.model, chat.raw, tmp_path / "whole.jsonl", temperature=2.0)
    whole = list(batches)
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        interrupt_after(patched, 2)
        make(chat.model, chat.raw, tmp_path / "pairs.jsonl", temperature=2.0)
    batches.clear()
    make(chat.model, chat.raw, tmp_path / "pairs.jsonl", temperature=2.0)
    assert len(whole) == 5 and batches == whole[2:]


def test_answers_that_were_half_written_are_made_again(tiny, tmp_path, monkeypatch, small_batches, unfiltered):
    make(tiny.model, tiny.raw, tmp_path / "whole.jsonl")
    output, journal = tmp_path / "pairs.jsonl", tmp_path / ".pairs.jsonl.part" / "answers.jsonl"
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(Interrupted):
            make(tiny.model, tiny.raw, output)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:9])
    assert make(tiny.model, tiny.raw, output).resumed_answers == 3
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_other_thresholds_need_no_new_answers(tiny, tmp_path, monkeypatch):
    output = tmp_path / "pairs.jsonl"
    with pytest.raises(BadData, match="no row is left"):
        make(tiny.model, tiny.raw, output, min_chars=100)
    interrupt_after(monkeypatch, 0)
    report = make(tiny.model, tiny.raw, output)
    assert report.resumed_answers == 24 and report.rows_out and report.forward is None


@pytest.mark.parametrize(
    ("change", "name"), [({"seed": 1}, "sampling"), ({"rows": 9}, "rows"), ({"top_p": 0.5}, "sampling")], ids=str
)
def test_answers_of_other_options_are_not_used(tiny, tmp_path, monkeypatch, small_batches, change, name):
    output, notes = tmp_path / "pairs.jsonl", []
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(Interrupted):
            make(tiny.model, tiny.raw, output)
    report = make(tiny.model, tiny.raw, output, notes.append, **change)
    assert report.resumed_answers == 0 and report.started_over == f"it had another {name}"
    assert any("starting over" in note for note in notes)


def test_answers_of_another_model_or_other_data_are_not_used(tiny, tmp_path, monkeypatch, small_batches):
    model, data = save(tiny.net, tmp_path / "model", tiny.tokenizer), write_jsonl(tmp_path / "rows.jsonl", ROWS)
    output = tmp_path / "pairs.jsonl"
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(Interrupted):
            make(model, data, output)
    save(make_model(tiny.net.config.vocab_size), model, tiny.tokenizer)
    write_jsonl(data, ROWS[:20])
    with pytest.raises(BadData, match="no row is left"):  # an untrained model does not stop
        make(model, data, output)
    key = json.loads((tmp_path / ".pairs.jsonl.part" / "key.json").read_text())
    answers = written(tmp_path / ".pairs.jsonl.part" / "answers.jsonl")
    assert len(answers) == 20 and key["data"] == open_source([str(data)], messages=True).fingerprint()


SCRIPT = """
import os, signal, sys
from brimful.tasks import rejects
from brimful.tasks.generate import Generator
from brimful.tasks.rejects import RejectsOptions, make_rejects
rejects.max_rows = lambda device: 5
answer_batch, count = Generator.answer_batch, 0
def answer(self, prompts):
    global count
    count += 1
    if count > 2: os.kill(os.getpid(), signal.SIGKILL)
    return answer_batch(self, prompts)
Generator.answer_batch = answer
model, data, output = sys.argv[1:]
make_rejects(model, data, output=output, options=RejectsOptions(temperature=1.5, max_new_tokens=12, device="cpu", max_similarity=0.95))
"""


def test_a_killed_run_continues_with_the_same_file(tiny, tmp_path, unfiltered):
    make(tiny.model, tiny.raw, tmp_path / "whole.jsonl")
    output = tmp_path / "pairs.jsonl"
    command = [sys.executable, "-c", SCRIPT, str(tiny.model), str(tiny.raw), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not output.exists()
    report = make(tiny.model, tiny.raw, output)
    assert report.resumed_answers == 10
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_two_runs_do_not_write_one_output(tiny, tmp_path):
    with (
        FileLock(tmp_path / ".pairs.jsonl.part", folder=True),
        pytest.raises(BadOption, match="is being written by another process"),
    ):
        make(tiny.model, tiny.raw, tmp_path / "pairs.jsonl")


# ── Filter ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reason(rejected, chosen="天空是蓝色的，因为光会散射。", prompt="天空是什么颜色？", **changes):
    limits = {"finished": True, "min_chars": 2, "max_similarity": 0.8, **changes}
    found = reason_to_drop(prompt, chosen, rejected, **limits)
    return found and found[0]


@pytest.mark.parametrize(
    ("rejected", "changes", "expected"),
    [
        ("天空是绿色的。", {}, None),
        ("", {}, "empty"),
        (" \n", {}, "empty"),
        ("天空是绿", {"finished": False}, "unfinished"),
        ("天空是\ufffd。", {}, "not_text"),
        ("天空是\ufffd。", {"prompt": "\ufffd是什么？天空"}, None),
        ("蓝", {}, "too_short"),
        ("蓝", {"min_chars": 1, "prompt": "颜色？"}, None),
        ("天空是蓝色的,因为光会散射。 ", {}, "identical"),
        ("天空是蓝色的，因为光会散开。", {}, "too_similar"),
        ("天空是蓝色的，因为光会散开。", {"max_similarity": 0.9}, None),
        ("Buy cheap watches", {}, "off_topic"),
        ("！？。…", {}, "off_topic"),
        ("Buy cheap watches", {"chosen": "蓝的。"}, None),
    ],
    ids=str,
)
def test_an_answer_is_dropped_for_the_first_reason_that_holds(rejected, changes, expected):
    assert reason(rejected, **changes) == expected


def test_every_reason_is_named_with_its_row():
    found = reason_to_drop("问？", "答案", "其他" * 30, finished=False, min_chars=2, max_similarity=0.8)
    assert found == ("unfinished", f"without an end before the token limit: {'其他' * 19 + '其…'!r}")


def test_similarity_is_symmetric_and_bounded():
    texts = ["", "a", "ab", "红色。", "红色红色。", "the cat sat", "The  cat\nsat"]
    for one in texts:
        assert similarity(one, one) == 1
        assert all(similarity(one, other) == similarity(other, one) <= 1 for other in texts)
    assert similarity("the cat sat", "The  cat\nsat") == 1
    assert similarity("abc", "xyz") == 0


def test_sentences_of_one_language_are_never_off_topic():
    texts = [row["prompt"] + row["response"] for row in ROWS]
    assert not any(is_off_topic(one, one, other) for one in texts for other in texts if one[1:3] == other[1:3])
    assert not is_off_topic("Why is the sky blue?", "The sky is blue because of scattering.", "I like other things.")


def test_rows_that_cannot_be_asked_are_counted_and_the_first_is_named(causal, tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    rows = [
        talk("甲的花？"),  # 1
        [*talk("甲的花？"), call],
        talk("", "红。"),  # 3
        [{"role": "assistant", "content": "红。"}],
        talk("乙的花？", " "),  # 5
        talk("甲的花？", "其他。"),
        talk("甲的花？", "红色。"),  # 7
        talk("丙的花？", "别的。"),
        talk("甲的" + "很长" * 300 + "路？", "红。"),  # 9
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": one} for one in rows])
    report = make(causal.model, data, tmp_path / "pairs.jsonl", temperature=0)
    expected = {"no_reply": 2, "no_prompt": 2, "empty_chosen": 1, "duplicate_prompt": 1, "prompt_too_long": 1}
    assert {name: report.dropped[name] for name in expected} == expected
    lines = {name: int(report.first_dropped[name].split("line ")[1].split(":")[0]) for name in expected}
    assert lines == {"no_reply": 1, "no_prompt": 3, "empty_chosen": 5, "duplicate_prompt": 7, "prompt_too_long": 9}
    assert [row["rejected"] for row in written(tmp_path / "pairs.jsonl")] == ["红色。", "黄色。"]
    assert report.answers == 2 and report.rows_in == 9 == report.rows_out + sum(report.dropped.values())


def test_a_conversation_that_the_template_refuses_is_counted(causal, tmp_path, monkeypatch):
    from brimful.tasks.chat_template import RowError

    prompt = Prompter.tokens

    def refusing(self, pair):
        if pair.line == 2:
            raise RowError("the chat template refuses the roles tool, user")
        return prompt(self, pair)

    monkeypatch.setattr(Prompter, "tokens", refusing)
    report = make(causal.model, causal.raw, tmp_path / "pairs.jsonl", temperature=2.0)
    assert report.dropped["refused"] == 1 and "line 2: the chat template refuses" in report.first_dropped["refused"]
    assert report.answers == 23


def test_unfinished_answers_are_dropped(tiny, tmp_path):
    """Three characters and the end are four tokens."""
    data = write_jsonl(tmp_path / "rows.jsonl", [{**row, "response": "别的。"} for row in ROWS])
    report = make(tiny.model, data, tmp_path / "pairs.jsonl", max_new_tokens=4, temperature=0)
    assert {row["rejected"] for row in written(tmp_path / "pairs.jsonl")} == {"红色。", "绿色。", "紫色。"}
    assert report.dropped["unfinished"] == 21 and "without an end" in report.first_dropped["unfinished"]


def test_broken_rows_stop_it_unless_they_are_allowed(tiny, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with data.open("a") as file:
        file.write("{\n")
    with pytest.raises(BadData, match=r"line 25: .*max_bad"):
        make(tiny.model, data, tmp_path / "pairs.jsonl")
    report = make(tiny.model, data, tmp_path / "pairs.jsonl", max_bad=0.1)
    assert report.dropped["broken"] == 1 and report.rows_in == 25


# ── Models and mistakes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_adapter_answers_with_its_base(causal, tmp_path):
    pytest.importorskip("peft")
    from brimful.tasks.adapters import Lora, load_base, with_adapter
    from brimful.tasks.adapters import save as save_adapter

    model = with_adapter(load_base(causal.model), Lora(r=2))
    add_noise(model, 0.05)
    folder = tmp_path / "adapter"
    save_adapter(model, folder)
    for file in causal.tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    report = make(folder, causal.raw, tmp_path / "pairs.jsonl", max_similarity=1.0)
    make(causal.model, causal.raw, tmp_path / "base.jsonl", max_similarity=1.0)
    assert report.rows_out and written(tmp_path / "pairs.jsonl") != written(tmp_path / "base.jsonl")
    assert any(str(causal.model) in name for name, *_ in Prompter(str(folder)).key[0]), "a changed base is noticed"


class WithoutAnswers:
    """The rows of a store with the end as their only answer."""

    def __init__(self, store):
        self.store = store

    def __len__(self):
        return len(self.store)

    def __getitems__(self, places):
        return [{**row, "response": row["response"][-1:]} for row in self.store.__getitems__(places)]


def test_a_model_that_says_nothing_has_learnt_to_be_silent(tiny, tmp_path):
    silent = learn(make_model(tiny.net.config.vocab_size), WithoutAnswers(tiny.store), steps=40)
    model = save(silent, tmp_path / "model", tiny.tokenizer)
    with pytest.raises(BadModel, match="has learnt to be silent: all of its 24 answers are empty"):
        make(model, tiny.raw, tmp_path / "pairs.jsonl", temperature=0.8)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_mistakes_are_one_sentence(tiny, causal, tmp_path):
    output = tmp_path / "pairs.jsonl"
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "甲"}])
    alone = write_jsonl(tmp_path / "alone.jsonl", [{"messages": talk("甲？")}])
    pairs = write_jsonl(tmp_path / "preferences.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for model, data, changes, kind, message in [
        (tiny.model, texts, {}, BadData, "has whole texts and no prompts"),
        (tiny.model, alone, {}, BadData, r"none of 1 rows has a prompt and a reply \(1 without a reply"),
        (tiny.model, pairs, {}, BadData, "holds preferences"),
        (tiny.model, tmp_path / "missing.jsonl", {}, BadData, "missing.jsonl"),
        (tmp_path / "missing", tiny.raw, {}, BadModel, "there is no model at"),
        ("chatlm-tiny", tiny.raw, {}, BadOption, "chatlm-tiny has new weights"),
        (tiny.model, tiny.raw, {"chat_template": "chatml"}, BadOption, "is for causal models"),
    ]:
        with pytest.raises(kind, match=message):
            make(model, data, output, **changes)
    without = causal.without_template(tmp_path / "base")
    with pytest.raises(BadModel, match="has no chat template"):
        make(without, causal.raw, output)
    assert make(without, causal.raw, output, chat_template=str(causal.model / "chat_template.jinja"), temperature=2.0)
    with pytest.raises(BadOption, match="is an existing file"):
        make(tiny.model, tiny.raw, output)
    with pytest.raises(BadOption, match="is a file of the data"):
        make(tiny.model, pairs, pairs, columns="prompt=prompt,response=chosen", overwrite=True)
    with pytest.raises(BadOption, match=r"must end in .jsonl"):
        make(tiny.model, tiny.raw, tmp_path / "pairs")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(BadOption, match="is a folder"):
        make(tiny.model, tiny.raw, tmp_path / "folder.jsonl")


def test_an_existing_file_is_replaced_if_asked(tiny, tmp_path):
    output = tmp_path / "pairs.jsonl"
    output.write_text("old")
    make(tiny.model, tiny.raw, output, overwrite=True)
    assert written(output)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "rows=0 must"),
        ({"min_chars": -1}, "min_chars=-1 must"),
        ({"max_similarity": 1.5}, "max_similarity=1.5 must"),
        ({"temperature": -1}, "temperature=-1 must"),
        ({"top_p": 0}, "top_p=0 must"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must"),
        ({"max_bad": 2}, "max_bad=2 must"),
        ({"fill": 2}, "fill=2 must"),
        ({"rows": 0, "min_chars": -1}, "rows=0 must .* min_chars=-1 must"),
    ],
    ids=str,
)
def test_options_are_checked(changes, message):
    with pytest.raises(BadOption, match=message):
        RejectsOptions(**changes)


def test_the_report_has_what_a_program_needs(tiny, tmp_path):
    report = make(tiny.model, tiny.raw, tmp_path / "pairs.jsonl").to_json()
    needed = {
        "rows_in",
        "rows_out",
        "dropped",
        "seconds",
        "answers_per_s",
        "peak_bytes",
        "output",
        "samples",
        "first_dropped",
    }
    assert needed <= set(report) and json.dumps(report)
    assert 0 < len(report["samples"]) <= 10 and set(report["samples"][0]) == {"prompt", "chosen", "rejected"}
    assert report["answers_per_s"] > 0 and report["answers"] == 24
