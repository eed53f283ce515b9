"""Plans, the machine and a run's events in Chinese: no English sentence is left, and every column is aligned."""

import re
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console, Group

from brimful.languages import set_language, translate
from brimful.planning.planner import plan as make_plan
from brimful.report.progress import Progress, RunPanel, RunSummary
from brimful.report.tables import eval_table, machine_table, plan_table
from brimful.report.wrapped_text import WrappedText
from brimful.units import GiB
from tests.planning.small import Normed, Pairs, Tagger, Texts, texts
from tests.report.test_progress import EVALUATION, lines_of, step
from tests.report.test_tables import GPU, HOST, MACHINE, REPORT, compared, plan  # noqa: F401 - fixtures
from tests.report.test_tables import PLAN as FORWARD

ENGLISH = re.compile(r"[A-Za-z][\w'.-]*(?:,? [A-Za-z'()][\w'.()-]*)+", re.ASCII)
KEPT = re.compile(
    r"padded|packed|fp32|bf16|checkpointed|compiled|GiB|MiB|KiB|TiB|min|ms|[shB]|tok|nc|[Ll]oss|from|Task|token|pid|h?ost"
    r"|CUDA|graph|cuDNN|Python|torch|NVIDIA|H\d+|Linux|BatchNorm|ModuleList|Sequential|NVML|RAM|the_|prompt|response|OOM|MFU"
)
"""Names, units and values of flags."""


@pytest.fixture(autouse=True)
def _chinese():
    set_language("zh")


def render(table, width=80) -> str:
    console = Console(width=width, file=StringIO())
    console.print(Group(table))
    return console.file.getvalue()


def english_in(text: str) -> list[str]:
    """Phrases of two English words or more that are not names, units or values of flags."""
    phrases = [match[0] for line in text.splitlines() for match in ENGLISH.finditer(line)]
    return [
        one for one in phrases if [word for word in re.findall(r"[A-Za-z][\w'-]*", one) if not KEPT.fullmatch(word)]
    ]


LIMITED = {"memory_limit": "4MiB", "device": "cpu", "cache": False}
PLANS = {
    "plain": lambda: make_plan(Tagger(), **LIMITED),
    "every setting tried": lambda: make_plan(Tagger(), table=True, **LIMITED),
    "no limit": lambda: make_plan(Tagger(), device="cpu", cache=False, global_batch=8),
    "with data": lambda: make_plan(Texts(), data=texts(*range(4, 64)), global_batch=16, **LIMITED),
    "fixed": lambda: make_plan(Tagger(), micro_batch=4, checkpointing="on", precision="bf16", workers=0, **LIMITED),
    "deterministic": lambda: make_plan(Tagger(), deterministic=True, **LIMITED),
    "bf16 weights": lambda: make_plan(Tagger(), weights="bf16", **LIMITED),
    "several processes": lambda: make_plan(Tagger(), processes=2, **LIMITED),
    "BatchNorm": lambda: make_plan(Normed(), **LIMITED),
    "inexact": lambda: make_plan(Pairs(), global_batch=4000, allow_inexact=True, **LIMITED),
    "no time": lambda: make_plan(Tagger(), plan_seconds=0.01, **LIMITED),
}


@pytest.mark.parametrize("name", PLANS)
def test_no_english_sentence_is_left_in_a_plan(name):
    assert english_in(render(plan_table(PLANS[name]()), 400)) == []


def test_the_search_for_english_finds_it():
    assert english_in("微批  the whole step fits without it") == ["the whole step fits without it"]
    assert english_in("packed bf16 compiled  3 min 20 s") == []


def test_the_columns_of_a_plan_are_aligned_for_wide_characters(plan):  # noqa: F811
    lines = [line for line in render(plan_table(plan), 400).splitlines() if "按要求" in line or "任务没有" in line]
    starts = {cell_len(line[: line.index(word)]) for line, word in zip(lines, ("按要求", "任务没有"), strict=True)}
    assert len(starts) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_a_plan_is_wider_than_the_terminal(compared, width):  # noqa: F811
    assert max(map(cell_len, render(plan_table(compared), width).splitlines())) <= width


def test_a_plan_in_json_stays_english(plan):  # noqa: F811
    assert plan.choice("layout").reason == "the task has no pack()"


def test_print_of_a_plan_stays_english(plan):  # noqa: F811
    assert "the task has no pack()" in str(plan)


def test_no_english_sentence_is_left_in_the_machine():
    assert english_in(render(machine_table(MACHINE), 400)) == []


PAIR_SCORES = {
    "accuracy": 0.8, "margin": 1.2, "rewards/chosen": 0.3, "rewards/rejected": -0.9, "logp_chosen": -2.5, "kl": 0.1, "bleu": None, "chrf": None,
    "preference_loss": "sigmoid", "truncated": {"prompt": 0, "chosen": 1, "rejected": 2}, "max_tokens_reason": "by default",
}  # fmt: skip
EVALUATIONS = {
    "some rows": {},
    "all rows": {"rows": 5000, "truncated": {"prompt": 8, "response": 41}},
    "replies": {"counted": "replies", "samples": [], "forward": {}},
    "pairs with a reference": {**PAIR_SCORES, "reference": "runs/sft"},
    "pairs": {**PAIR_SCORES, "reference": None, "loss": None},
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_no_english_sentence_is_left_in_an_evaluation(name):
    samples = [{"prompt": "问", "response": "", "reference": "答"}]
    shown = render(
        eval_table({**REPORT, "forward": {"evaluation": FORWARD}, "samples": samples, **EVALUATIONS[name]}), 400
    )
    assert english_in(shown) == []
    assert not re.search(r"\b(rows?|prompts?|responses?|reference|answers?|pairs?|tokens)\b", shown)
    assert "截断" in shown and "实测峰值" in shown and "没有 OOM" in shown


@pytest.mark.parametrize(
    ("phrase", "chinese"),
    [
        ("tokenized 400 rows, 535 rows/s, 100%", "已转换 400 行，535 行/秒，100%"),
        ("tokenized 400 rows, 535 rows/s", "已转换 400 行，535 行/秒"),
        ("time 2 rows with 116+192 tokens", "计时 2 行（116+192 个 token）"),
        ("padded fp32 checkpointed every-2: no time left", "补齐 fp32 梯度检查点 every-2：没有时间了"),
    ],
)
def test_a_phrase_of_the_preparation_is_chinese_throughout(phrase, chinese):
    assert translate(phrase) == chinese


@pytest.mark.parametrize(
    "event",
    [
        EVALUATION,
        {"event": "begin", "run": "runs/a", "steps": 20, "processes": 2},
        {"event": "checkpoint", "step": 5, "saved": True, "path": "runs/a/x", "size_bytes": GiB, "seconds": 1.5},
        {"event": "resume", "step": 5, "sentence": "continuing after step 5"},
        {
            "event": "oom",
            "step": 5,
            "sentence": "out of memory in forward, micro-batch 1 of 2 (8 rows of 40): "
            "micro-batches of this length now have at most 4 rows",
        },
        {
            "event": "note",
            "step": 5,
            "sentence": "loader worker 7 was killed by the kernel because host RAM ran out. "
            "Training continues with 2 loader workers instead of 4; no row is lost",
        },
        {
            "event": "skip",
            "step": 5,
            "sentence": "the gradient norm is nan (first in 'weight'): 2 consecutive steps skipped, at most 20",
        },
    ],
    ids=lambda event: event["event"],
)
def test_the_line_of_an_event_is_chinese(event):
    (line,) = lines_of([event])
    assert re.search(r"[\u4e00-\u9fff]", line) and english_in(line) == []


def test_the_line_of_a_step_is_chinese():
    assert lines_of([step(7, ooms=2)]) == [
        "第 7/100 步  损失 2.0000  学习率 1.00e-04  轮次 0.50  700 行/秒  70,000 token/秒  MFU 12.3%  等待数据 1.0%  "
        "检查点 –  内存 15 GiB，上限 20 GiB，75%，挺过 2 次 OOM  剩余 1 min 15 s"
    ]


def test_what_the_preparation_does_is_chinese():
    stream = StringIO()
    with Progress.open(stream, 0) as progress:
        progress.status("probe 8 rows of 64")
    assert stream.getvalue() == "试跑 8 行（长 64）\n"


def test_the_panel_of_a_run_fits_80_columns():
    summary = RunSummary()
    for event in (step(7), EVALUATION):
        summary.add(event)
    text = render(RunPanel(summary))
    assert (
        "学习率" in text
        and "最佳 损失 2.5000" in text
        and "第 7/100 步" in text
        and max(map(cell_len, text.splitlines())) <= 80
    )


def test_a_line_ends_between_two_chinese_characters():
    lines = render(WrappedText("读取一步要 1.92 ms，是预测训练时间的一半"), 20).splitlines()
    assert [line.rstrip() for line in lines] == ["读取一步要 1.92 ms，", "是预测训练时间的一半"]


def test_no_line_begins_with_closing_punctuation():
    lines = render(WrappedText("一二三四五，六七八九十。（一二三四）"), 10).splitlines()
    assert all(line[0] not in "，。）" and line.rstrip()[-1] != "（" for line in lines)


def test_a_long_path_is_cut():
    lines = render(WrappedText("保存到 /" + "x" * 50), 20).splitlines()
    assert max(map(cell_len, lines)) <= 20 and sum(line.count("x") for line in lines) == 50


@pytest.mark.parametrize("by", ["cgroup v2 memory.max of /job", "physical memory"])
def test_what_limits_the_machine_is_translated(by):
    assert "of" not in translate(by)


def test_who_holds_a_gpu_is_translated():
    assert translate("python3 (pid 4711) holds 61 GiB and 2 more hold 3 GiB") == (
        "python3（pid 4711）占用 61 GiB 和另外 2 个占用 3 GiB"
    )
    assert GPU.index == 0 and HOST.cores == 16
