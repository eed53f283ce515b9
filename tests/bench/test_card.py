"""What is run on a GPU in one lease, and the table of it: order, time, and verdicts from given lines. Nothing here needs a GPU."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
GIB = 2**30


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(BENCH))  # as `python bench/card.py` has it
    try:
        yield {name: importlib.import_module(name) for name in ("card", "claims")}
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture
def card(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With parts that write down when they begin and end."""
    card = modules["card"]
    script = (
        "import sys, time; from pathlib import Path; note = Path('{results}/order.jsonl').open('a'); "
        "note.write('\"{part} begins\"\\n'); note.flush(); time.sleep({seconds}); note.write('\"{part} ends\"\\n')"
    )

    def part(seconds: float, *more: list[str]) -> Any:
        return card.Part(1, [["-c", script.replace("{seconds}", str(seconds))], *more])

    parts = {"first": part(0.1), "second": part(0.1), "one": part(0.6), "other": part(0.6), "slow": part(60), "last": part(0.1), "broken": card.Part(1, [["-c", "raise SystemExit('no such thing')"]])}  # fmt: skip
    monkeypatch.setattr(card, "PARTS", parts)
    monkeypatch.setattr(card, "CALLS", ((("first",), ("one", "other"), ("second",)), (("slow",),)))
    monkeypatch.setattr(card, "LAST", ("last",))
    monkeypatch.setattr(card, "_section", lambda *_: "the section")
    return card


def notes(output: Path) -> list[str]:
    with tarfile.open(output / "results.tgz") as archive:
        stream = archive.extractfile("order.jsonl")
        assert stream is not None
        return [json.loads(line) for line in stream.read().splitlines()]


def call(card: ModuleType, tmp_path: Path, *words: str) -> int:
    status: int = card.main([*words, "--output", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch")])
    return status


def test_parts_run_one_after_the_other_and_only_those_of_a_slot_together(card: ModuleType, tmp_path: Path) -> None:
    assert call(card, tmp_path, "1") == 0
    told = notes(tmp_path / "out")
    assert told[:2] == ["first begins", "first ends"] and told[6:8] == ["second begins", "second ends"]
    assert sorted(told[2:4]) == ["one begins", "other begins"]
    assert told[8:] == ["last begins", "last ends"]


def test_a_call_that_is_killed_leaves_what_there_was(
    card: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "SAVE_EVERY_S", 0.2)
    left: list[Any] = []
    end = card.Running.end

    def look(part: Any, why: str) -> None:
        if not left:
            with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
                stream = archive.extractfile("parts.json")
                assert stream is not None
                left.extend([notes(tmp_path / "out"), json.loads(stream.read())["slow"]["problem"]])
        end(part, why)

    monkeypatch.setattr(card.Running, "end", look)
    call(card, tmp_path, "first", "slow", "--seconds", str(card.REPORT_S + 3))
    assert left == [["first begins", "first ends", "slow begins"], "it had not ended"]


def test_a_call_that_is_told_to_end_writes_its_section(
    card: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    monkeypatch.setitem(card.PARTS, "asks", card.Part(1, [["-c", script]]))
    started, before = time.monotonic(), signal.getsignal(signal.SIGTERM)
    assert call(card, tmp_path, "asks", "first") == 1
    assert time.monotonic() - started < 30 and signal.getsignal(signal.SIGTERM) == before
    with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
        assert {"section.md", "parts.json"} <= set(archive.getnames())


def test_parts_belong_to_the_session_of_the_call(
    card: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where calls are cut off, what has a session of its own runs on beside the next call."""
    script = "import json, os; open('{results}/order.jsonl', 'w').write(json.dumps([os.getsid(0), os.getpgid(0)]))"
    monkeypatch.setitem(card.PARTS, "tells", card.Part(1, [["-c", script]]))
    assert call(card, tmp_path, "tells") == 0
    [[session, group]] = notes(tmp_path / "out")
    assert session == os.getsid(0) and group != os.getpgid(0)


def test_nothing_waits_for_a_process_that_cannot_be_killed(
    card: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    kill = os.killpg
    monkeypatch.setattr(card.os, "killpg", lambda group, number: killed.append(group))
    monkeypatch.setattr(card, "STUCK_S", 0.5)
    started = time.monotonic()
    try:
        assert call(card, tmp_path, "slow", "--seconds", str(card.REPORT_S + 1)) == 1
        assert killed and time.monotonic() - started < 30
    finally:
        kill(killed[0], signal.SIGKILL)


def test_what_was_packed_is_unpacked_first(card: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("bench", ".carry"):
        (tmp_path / folder).mkdir()
    shutil.copy(BENCH / "carry.sh", tmp_path / "bench")
    with zipfile.ZipFile(tmp_path / ".carry/peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer.py", "name = 'a peer'\n")
    monkeypatch.setattr(card, "ROOT", tmp_path)
    script = "import json, peer; open('{results}/order.jsonl', 'w').write(json.dumps(peer.name))"
    monkeypatch.setitem(card.PARTS, "imports", card.Part(1, [["-c", script]]))
    assert call(card, tmp_path, "imports") == 0
    assert notes(tmp_path / "out") == ["a peer"]


def test_what_is_over_its_time_is_ended_with_its_results_and_the_rest_is_named(
    card: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert call(card, tmp_path, "slow", "first", "--seconds", str(card.REPORT_S + 1.5)) == 1
    assert time.monotonic() - started < 30
    assert notes(tmp_path / "out") == ["slow begins"]
    told = capsys.readouterr().out
    assert "slow: it was ended: the time of the call was over" in told and "no time left for first" in told


def test_a_part_that_fails_does_not_stop_the_others_and_its_log_is_shown(
    card: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(card, tmp_path, "broken", "first") == 1
    told = capsys.readouterr().out
    assert "== broken: -c ended with 1\nno such thing" in told and told.endswith("\nthe section\n")
    assert notes(tmp_path / "out") == ["first begins", "first ends"]


def test_a_part_that_does_not_exist_is_named(
    modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert modules["card"].main(["pretrain", "nonsense"]) == 2
    assert "no part nonsense. Try: --list" in capsys.readouterr().out


def test_each_call_is_expected_to_take_less_than_nine_and_a_half_minutes(modules: dict[str, ModuleType]) -> None:
    card = modules["card"]
    assert len(card.CALLS) <= 3
    for slots in card.CALLS:
        assert sum(max(card.PARTS[name].about_s for name in slot) for slot in slots) + card.REPORT_S <= 570
    named = [name for slots in card.CALLS for slot in slots for name in slot]
    assert len(named) == len(set(named)) and set(named) <= set(card.PARTS)


def test_nothing_that_is_timed_has_anything_beside_it(modules: dict[str, ModuleType]) -> None:
    beside = {name for slots in modules["card"].CALLS for slot in slots if len(slot) > 1 for name in slot}
    untimed = ("tests-", "estimate-", "learn", "survive", "losses")
    assert beside and all(name.startswith(untimed) for name in beside)
    files = {
        word
        for name in beside
        for command in modules["card"].PARTS[name].commands
        if "--prepare" not in command
        for word in command
        if word.endswith(".jsonl")
    }
    assert files == {
        "{results}/losses.jsonl",
        "{results}/survive.jsonl",
        "{results}/sft-12gib.jsonl",
    }  # of no table of speeds


def test_all_tests_of_a_gpu_are_run_once_by_their_files(modules: dict[str, ModuleType]) -> None:
    """A folder has files that need packages which a GPU machine lacks, and one of them ends the whole part."""
    words = [word for part in modules["card"].PARTS.values() for command in part.commands if command[0] == "-m" for word in command]  # fmt: skip
    named = [word for word in words if word.startswith("tests/") and "::" not in word]
    tests = BENCH.parent / "tests"
    marked = [
        file for file in tests.rglob("test_*.py") if "pytest.mark.gpu" in file.read_text() and "bench" not in file.parts
    ]
    assert sorted(named) == sorted(str(file.relative_to(BENCH.parent)) for file in marked)
    assert not [file for file in marked if "hypothesis" in file.read_text()]


def test_every_flag_of_a_part_is_one_that_its_bench_has(modules: dict[str, ModuleType]) -> None:
    benches = {name: (BENCH / name).read_text() for name in ("train.py", "sft.py", "dpo.py", "serve.py", "record.py", "estimate.py", "oom_midrun.py")}  # fmt: skip
    for part in modules["card"].PARTS.values():
        for command in part.commands:
            for some in (command, modules["card"].smaller(command)):
                flags = [word.removeprefix("--") for word in some[1:] if word.startswith("--")]
                source = benches.get(some[0])
                assert source is None or all(f'"--{flag}"' in source or f'("{flag}", ' in source for flag in flags), (
                    some
                )


def test_files_of_several_calls_become_one(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    archives = []
    for number, seconds in ((1, 10), (2, 20)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.jsonl").write_text(json.dumps({"number": number}))  # and the newline is cut off
        part = SimpleNamespace(name=f"part-{number}", facts=lambda seconds=seconds: {"seconds": seconds})
        modules["card"]._save(folder, folder, [part])
        archives.append(folder / "results.tgz")
    merged = tmp_path / "merged"
    merged.mkdir()
    modules["card"].merge(archives, merged)
    assert [json.loads(line)["number"] for line in (merged / "train.jsonl").read_text().splitlines()] == [1, 2]
    assert list(json.loads((merged / "parts.json").read_text())) == ["part-1", "part-2"]


def test_a_dry_run_of_a_part_ends_in_the_table(tmp_path: Path) -> None:
    words = ["record", "estimate-0", "--tiny", "--output", tmp_path / "out", "--scratch", tmp_path / "scratch"]
    done = subprocess.run(
        [sys.executable, BENCH / "card.py", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "record: done after" in done.stdout and "| 17 | recording, of a step | ≤ 0.5 % | × " in done.stdout
    with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
        assert {"record.json", "record.log", "estimate-0.json", "parts.json", "section.md"} <= set(archive.getnames())
    assert "### `bench/record.py`" in done.stdout and "### `bench/estimate.py`" in done.stdout


# ---- The table --------------------------------------------------------------------------------------------------------


def train_line(case: str, entry: str, speed: float, **more: Any) -> dict[str, Any]:
    own = (
        {"plan": {"layout": "packed", "ooms": 0}, "plan_s": 7.0, "ooms": 0, "prediction_error": 0.004}
        if entry.startswith("brimful")
        else {}
    )
    return {
        "case": case, "entry": entry, "trainer": "brimful" if entry.startswith("brimful") else "hf", "cap_bytes": 20 * GIB, "seed": 0,
        "rows_per_s": speed, "run_s": 76_800 / speed + 60, "run_s_extrapolated": False, "compiled_before": False, "tiny": False, "error": "",
        "status": "ok", "options": {}, "steps": 30, "loss": [9.0 - 0.1 * step for step in range(30)], "date": "2026-11-20T10:00:00", "device_name": "A CARD",
        **own, **more,
    }  # fmt: skip


def sft_line(model: str, contestant: str, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "data": "long", "limit_bytes": 24 * GIB, "contestant": contestant, "setting": "a setting", "tokens_per_s": speed, "ooms": 0,
        "status": "ok", "error": "", "global_batch_kept": True, "prediction_error": 0.01, "loss": [5.0, 4.0], "steps": 2, "same_rows": True,
        "wall_s": 1.0, "tiny": False, "rows_per_step": 64, "settings": 1, **more,
    }  # fmt: skip


def verdicts(claims: ModuleType, **files: Any) -> dict[str, tuple[str, str]]:
    """By claim that needs a GPU, what was measured and the verdict."""
    rows = [line.strip("| ").split(" | ") for line in claims.table(claims.Results(**files)).splitlines()[2:]]
    assert not [row for row in rows if "could not be read" in row[3]]
    return {what: (measured, verdict) for _, what, _, measured, verdict in rows if verdict != "no GPU"}


def test_without_a_figure_nothing_passes_and_nothing_fails(modules: dict[str, ModuleType]) -> None:
    found = verdicts(modules["claims"])
    assert len(found) == len(modules["claims"].CLAIMS)
    assert set(found.values()) == {("not measured", "–")}


def test_speeds_are_medians_of_three_seeds_and_compared_with_the_best_of_hf(modules: dict[str, ModuleType]) -> None:
    lines = [train_line("pretrain", "brimful", speed, seed=seed) for seed, speed in enumerate((1400, 3000, 3100))]
    lines += [train_line("pretrain", "hf-32", 140), train_line("pretrain", "hf-tuned-32", 250)]
    lines += [train_line("sft", "brimful", 9000), train_line("pretrain", "brimful", 1, cap_bytes=None)]
    found = verdicts(modules["claims"], train=lines)
    assert found["T5, real rows, 20 GiB, 256 a step: pretrain"] == ("3,000 rows/s (3 seeds)", "pass")
    assert found["the same, SFT with a frozen encoder"] == ("9,000 rows/s (1 seed)", "**fail**")
    assert found["pretrain against the best HF setting of the run"] == (
        "× 12.00 (brimful: 3,000, hf-tuned-32: 250 rows/s)",
        "pass",
    )
    assert found["SFT against the best HF setting of the run"] == ("HF not measured", "–")


def test_the_time_to_300_steps_is_of_a_run_that_compiled(modules: dict[str, ModuleType]) -> None:
    lines = [
        train_line("pretrain", "brimful", 3000, run_s=400.0),
        train_line("pretrain", "brimful", 3000, run_s=30.0, compiled_before=True),
    ]
    lines.append(train_line("pretrain", "hf-32", 100, run_s=300.0, run_s_extrapolated=True))
    found = verdicts(modules["claims"], train=lines)
    assert found["pretrain, 300 steps with compile time"] == ("brimful: 400 s, hf-32: ~300 s", "**fail**")


def test_predictions_and_plans_are_judged_by_the_worst(modules: dict[str, ModuleType]) -> None:
    lines = [
        train_line("pretrain", "brimful", 3000),
        train_line("full", "brimful", 900, prediction_error=-0.02, plan_s=9.2, useful_share=0.36),
    ]
    found = verdicts(modules["claims"], train=lines)
    assert found["predicted peak of packed steps"] == ("at most -2.0% in 2 runs", "**fail**")
    assert found["out-of-memory errors to a plan"] == ("0 in 2 plan and runs", "pass")
    assert found["time to a plan without compilation"] == ("7.0 to 9.2 s", "**fail**")
    assert found["full 256+256: share of the best matrix product"] == ("36.0% (brimful)", "pass")


@pytest.mark.parametrize(("shift", "verdict"), [(0.01, "pass"), (0.5, "**fail**")])
def test_loss_curves_are_compared_with_what_seeds_change(
    modules: dict[str, ModuleType], shift: float, verdict: str
) -> None:
    def curve(entry: str, more: float) -> list[dict[str, Any]]:
        return [train_line("pretrain", entry, 1, seed=seed, loss=[5.0 + 0.1 * seed + more] * 40) for seed in range(3)]

    found = verdicts(modules["claims"], train=curve("brimful", shift), losses=curve("brimful-padded", 0.0))
    assert found["loss curves packed against padded, bf16"] == (
        f"{shift:.4f} apart, padded runs ± 0.1000 over 3 seeds, up to step 40",
        verdict,
    )


def test_fine_tuning_needs_both_of_trls_figures_to_pass_and_one_to_fail(modules: dict[str, ModuleType]) -> None:
    lines = [
        sft_line("qwen2.5-0.5b", "brimful", 300),
        sft_line("qwen2.5-0.5b", "trl", 100),
        sft_line("qwen2.5-0.5b", "trl-tuned", 250),
    ]
    lines += [sft_line("qwen2.5-1.5b", "brimful", 300), sft_line("qwen2.5-1.5b", "trl", 100)]
    lines += [sft_line("llama-8b-lora", "brimful", 300), sft_line("llama-8b-lora", "trl", 290)]
    lines += [{**sft_line("llama-8b-qlora", "brimful", 0), "status": "OOM", "error": "CUDA out of memory"}]
    del lines[-1]["tokens_per_s"]
    found = verdicts(modules["claims"], sft=lines)
    assert found["Qwen2.5-0.5B, all weights, 24 GiB"] == (
        "brimful: 300 tokens/s, TRL × 3.00 (a setting: 100.0), tuned × 1.20 (a setting: 250.0); 0 OOMs, predicted +1.0%, batch kept",
        "pass",
    )
    assert (
        found["Qwen2.5-1.5B, all weights, 24 GiB"][1] == "–"
        and "tuned not measured" in found["Qwen2.5-1.5B, all weights, 24 GiB"][0]
    )
    assert found["8B LoRA, 24 GiB"][1] == "**fail**"
    assert found["8B QLoRA, 24 GiB"] == ("OOM: CUDA out of memory", "**fail**")


def test_a_peer_is_beaten_where_all_of_its_settings_ran_out_of_memory(modules: dict[str, ModuleType]) -> None:
    def without_memory(contestant: str, setting: str) -> dict[str, Any]:
        line = sft_line(
            "qwen2.5-1.5b", contestant, 0, status="OOM", error="CUDA out of memory", setting=setting, settings=2
        )
        return {name: value for name, value in line.items() if name != "tokens_per_s"}

    own, what = sft_line("qwen2.5-1.5b", "brimful-bf16", 300), "Qwen2.5-1.5B, all weights, 24 GiB"
    lines = [own, sft_line("qwen2.5-1.5b", "trl", 100, settings=8), without_memory("trl-tuned", "batch 4")]
    assert verdicts(modules["claims"], sft=lines)[what] == (
        "brimful-bf16: 300 tokens/s, TRL × 3.00 (a setting: 100.0), tuned not measured, only 1 of 2 settings measured; 0 OOMs, predicted +1.0%, batch kept",
        "–",
    )
    lines.append(without_memory("trl-tuned", "batch 8"))
    measured, verdict = verdicts(modules["claims"], sft=lines)[what]
    assert "tuned out of memory with 2 settings" in measured and verdict == "pass"


def test_a_grid_that_was_cut_short_is_not_tuned(modules: dict[str, ModuleType]) -> None:
    lines = [sft_line("qwen2.5-0.5b", name, speed, settings=of) for name, speed, of in (("brimful", 300, 1), ("trl", 100, 4), ("trl-tuned", 250, 3))]  # fmt: skip
    measured, verdict = verdicts(modules["claims"], sft=lines)["Qwen2.5-0.5B, all weights, 24 GiB"]
    assert "tuned × 1.20 (a setting: 250.0, only 1 of 3 settings measured)" in measured and verdict == "–"
    others = [sft_line("qwen2.5-0.5b", "trl-tuned", 100, settings=3, setting=name) for name in ("batch 4", "batch 8")]
    assert verdicts(modules["claims"], sft=[*lines, *others])["Qwen2.5-0.5B, all weights, 24 GiB"][1] == "pass"
    others[1] |= {"status": "error"}
    del others[1]["tokens_per_s"]
    assert verdicts(modules["claims"], sft=[*lines, *others])["Qwen2.5-0.5B, all weights, 24 GiB"][1] == "–"
    lines[2]["tokens_per_s"] = 400
    assert verdicts(modules["claims"], sft=lines)["Qwen2.5-0.5B, all weights, 24 GiB"][1] == "**fail**"


def test_the_prediction_of_a_plan_counts_too(modules: dict[str, ModuleType]) -> None:
    plan = {"layout": "packed", "ooms": 0, "predicted_peak_bytes": 103, "measured_peak_bytes": 100}
    lines = [
        train_line("pretrain", "brimful", 3000, prediction_error=None, plan=plan),
        train_line("sft", "brimful", 3000),
    ]
    found = verdicts(modules["claims"], train=lines)
    assert found["predicted peak of packed steps"] == ("at most +3.0% in 2 runs", "**fail**")
    lines[0]["plan"] = {"layout": "packed", "ooms": 0}
    found = verdicts(modules["claims"], train=lines)
    assert found["predicted peak of packed steps"] == ("at most +0.4% in 1 run of 2", "–")


def test_what_cannot_be_known_has_not_passed(modules: dict[str, ModuleType]) -> None:
    calm = sft_line("llama-8b-lora", "survive, undisturbed", 1, setting="undisturbed", loss=[5.0, 4.0, 3.0])
    rough = {**calm, "contestant": "survive, memory taken", "survived_ooms": 1, "loss": [5.0, float("nan"), 3.0]}
    capped = sft_line("llama-8b-qlora", "brimful", 1, limit_bytes=12 * GIB)
    own = {"case": "causal", "clients": 64, "entry": "brimful", "tokens_per_s": 900.0, "requests": 9, "errors": {}}
    learn = {"accuracy": 0.95, "pairs": 100, "perplexity_change": 0.0}
    files = {
        "survive": [calm, rough], "sft_12gib": [capped], "serve": [own, {**own, "entry": "transformers", "tokens_per_s": 100.0}],
        "learn": {"training": learn, "held back": learn}, "tests": {"tests-step": {"tests": 9, "failures": 0, "errors": 0, "skipped": 0}},
    }  # fmt: skip
    files["record"] = {"ratio": 1.001, "ratios": [0.98, 1.001, 1.03], "device": "A CARD"}
    found = verdicts(modules["claims"], **files)
    assert found["recording, of a step"] == ("× 1.0010 (0.9800 to 1.0300), A CARD", "–")
    assert found["memory taken in the middle of an 8B LoRA run"][1] == "**fail**"
    assert found["8B QLoRA"] == ("runs, – reserved, 0 OOMs", "–")
    assert found["T5 after SFT, its own answers rejected"][1] == "–"
    assert found["tests that need a GPU"] == (
        "9 passed, 0 failed, 0 skipped; not tests-whole-card, tests-packing, tests-planning, tests-training",
        "–",
    )
    what = "0.5 B causal, 64 clients, against `transformers serve`"
    assert found[what] == ("× 9.00 (900 tokens/s, transformers-cb: not measured, transformers: 100)", "–")
    files["serve"].append({"case": "causal", "clients": 64, "entry": "transformers-cb", "failed": "no first answer"})
    assert verdicts(modules["claims"], **files)[what] == ("× 9.00 (900 tokens/s, transformers-cb: no first answer, transformers: 100)", "pass")  # fmt: skip
    own["errors"] = {"HTTP/1.1 500": 2}
    assert verdicts(modules["claims"], **files)[what][1] == "**fail**"


def test_speeds_without_a_limit_are_not_those_in_the_same_memory(modules: dict[str, ModuleType]) -> None:
    pair = {"model": "t5", "setting": "a setting", "settings": 1, "ooms": 0, "status": "ok"}
    dpo = [{**pair, "contestant": "brimful", "limit_bytes": None, "pairs_per_s": 90.0}, {**pair, "contestant": "two-models", "limit_bytes": 20 * GIB, "pairs_per_s": 10.0}]  # fmt: skip
    what = "T5 against two models in the same memory"
    assert verdicts(modules["claims"], dpo=dpo)[what] == ("not measured", "–")


def test_an_estimate_is_judged_by_its_whole_suite(modules: dict[str, ModuleType]) -> None:
    row = {"case": "a", "expandable": True, "predicted_allocated": 101, "allocated": 100, "predicted_reserved": 101, "reserved": 100}  # fmt: skip
    case = {"case": "a", "rows": [row] * 3, "recommended": 7, "recommended_fits": True, "done": True, "problem": ""}
    one = {"cases": 2, "results": [case]}
    found = verdicts(modules["claims"], estimates=[one])
    assert found["estimated allocated bytes"] == (
        "median 1.0%, 95th percentile 1.0% of 3 measurements in 1 of 2 cases",
        "–",
    )
    assert found["recommended sizes"] == ("1 of 1 fitted, of 2 cases", "–")
    other = {"cases": 2, "results": [{**case, "case": "b", "rows": [{**row, "case": "b"}], "recommended": 0, "recommended_fits": None}]}  # fmt: skip
    found = verdicts(modules["claims"], estimates=[one, other])
    assert found["estimated allocated bytes"][1] == found["recommended sizes"][1] == "pass"


def test_what_was_cut_off_is_left_out_and_named(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        json.dumps(train_line("pretrain", "brimful", 3000)) + '\n{"case": "sft", "ent'
    )
    (tmp_path / "estimate-0.json").write_text('{"results": [')
    (tmp_path / "tests-step.xml").write_text("<testsuites><testsui")
    (tmp_path / "record.json").write_text("{}")
    (tmp_path / "serve.jsonl").write_text('{"of another": "kind"}\n')
    claims = modules["claims"]
    text = claims.section(claims.Results.read(tmp_path))
    assert "| 3,000 rows/s (1 seed) |" in text and "Cut off: tests-step.xml, train.jsonl, estimate-0.json." in text
    assert "could not be read: KeyError" in text and "could not be shown: KeyError" in text


def test_memory_that_did_not_run_out_shows_nothing(modules: dict[str, ModuleType]) -> None:
    run = {
        "steps_done": 100,
        "steps_requested": 100,
        "rows_lost": 0,
        "rows_repeated": 0,
        "global_batches": [256],
        "died": "",
    }
    file = {
        "global_batch": 256,
        "levers": {"cuda_graphs": "on"},
        "recovery": {"results": [run], "after_over_before": 0.99, "ooms": 1},
    }
    what = "memory taken in mid-run, packed"
    assert verdicts(modules["claims"], midrun=file)[what] == (
        "× 0.990 after, 100 of 100 steps, 0 rows lost, 0 repeated, 1 OOM, CUDA graph on",
        "pass",
    )
    file["recovery"]["ooms"] = 0
    assert verdicts(modules["claims"], midrun=file)[what][1] == "–"
    file["recovery"] |= {"ooms": 1, "results": [{**run, "rows_lost": 256}]}
    assert verdicts(modules["claims"], midrun=file)[what][1] == "**fail**"


def test_other_benches_have_their_verdicts(modules: dict[str, ModuleType]) -> None:
    calm = sft_line("llama-8b-lora", "survive, undisturbed", 1, setting="undisturbed")
    rough = {
        **calm,
        "contestant": "survive, memory taken",
        "survived_ooms": 1,
        "taken_bytes": 4 * GIB,
        "loss": [5.0, 4.01],
    }
    pair = {"limit_bytes": 20 * GIB, "setting": "a setting", "settings": 1, "ooms": 0, "status": "ok"}
    dpo = [
        {**pair, "model": "t5", "contestant": name, "pairs_per_s": speed}
        for name, speed in (("brimful", 30.0), ("two-models", 10.0), ("two-models", 16.0))
    ]
    serve = [
        {"case": "t5", "clients": 64, "entry": name, "tokens_per_s": speed, "requests": 9, "errors": {}}
        for name, speed in (("brimful", 600.0), ("one", 100.0))
    ]
    rows = [
        {
            "case": "a",
            "expandable": True,
            "predicted_allocated": 101,
            "allocated": 100,
            "predicted_reserved": 110,
            "reserved": 100,
        }
    ] * 3
    found = verdicts(
        modules["claims"], survive=[calm, rough], dpo=dpo, serve=serve, record={"ratio": 1.001, "ratios": [1.0, 1.002], "device": "A CARD"},
        estimates=[{"cases": 1, "results": [{"case": "a", "rows": rows, "recommended": 7, "recommended_fits": False, "done": True, "problem": ""}]}],
        learn={name: {"accuracy": 0.95, "pairs": 300, "perplexity_change": change} for name, change in (("training", 0.02), ("held back", -0.3))},
        tests={"tests-step": {"tests": 9, "failures": 1, "errors": 0, "skipped": 2}},
        sft_12gib=[sft_line("llama-8b-qlora", "brimful", 1, reserved_bytes=11 * GIB, limit_bytes=12 * GIB)],
    )  # fmt: skip
    assert (
        found["memory taken in the middle of an 8B LoRA run"][1] == "pass"
        and "2.5e-03 apart" in found["memory taken in the middle of an 8B LoRA run"][0]
    )
    assert found["T5 against two models in the same memory"] == (
        "30.0 pairs/s, 0 OOMs; two-models × 1.88 (a setting: 16.0)",
        "**fail**",
    )
    assert found["T5, 64 clients, against one request at a time"] == ("× 6.00 (600 tokens/s, one: 100)", "pass")
    assert found["recording, of a step"][1] == "pass"
    assert found["estimated allocated bytes"] == (
        "median 1.0%, 95th percentile 1.0% of 3 measurements in 1 of 1 case",
        "pass",
    )
    assert found["estimated reserved bytes"][1] == "**fail**"
    assert found["recommended sizes"] == ("0 of 1 fitted; not a (7 rows), of 1 case", "**fail**")
    assert found["T5 after SFT, its own answers rejected"] == (
        "0.950 of 300 pairs, 0.950 of 300 held back, perplexity -30.0%",
        "**fail**",
    )
    assert found["tests that need a GPU"] == (
        "6 passed, 1 failed, 2 skipped; not tests-whole-card, tests-packing, tests-planning, tests-training",
        "**fail**",
    )
    assert found["8B QLoRA"] == ("runs, 11.00 GiB reserved, 0 OOMs", "pass")


def test_the_section_has_the_table_first_and_the_tables_of_the_benches(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    lines = [train_line("pretrain", "brimful", 3000), train_line("pretrain", "hf-32", 140)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "sft.jsonl").write_text(json.dumps(sft_line("llama-8b-lora", "brimful", 300)) + "\n")
    (tmp_path / "parts.json").write_text(json.dumps({"pretrain": {"seconds": 150.0, "problem": "", "tiny": True}}))
    (tmp_path / "tests-step.xml").write_text(
        '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"/></testsuites>'
    )
    claims = modules["claims"]
    text = claims.section(claims.Results.read(tmp_path))
    assert text.startswith("## What must be shown: A CARD, 2026-11-20") and "A dry run with tiny models" in text
    assert (
        text.index("| issue | what must be shown |")
        < text.index("### `bench/train.py`")
        < text.index("### `bench/sft.py`")
    )
    assert (
        "2 passed, 0 failed, 1 skipped" in text
        and "| hf, best of these: hf-32 |" in text
        and "`bench/serve.py`" not in text
    )


def test_a_call_without_the_first_bench_names_its_device_too(modules: dict[str, ModuleType]) -> None:
    claims = modules["claims"]
    pair = {"model": "t5", "limit_bytes": 20 * GIB, "contestant": "brimful", "setting": "no setting", "settings": 1, "status": "OOM", "error": "", "ooms": 1, "tiny": False, "global_batch": 64, "device_name": "A CARD"}  # fmt: skip
    survive = sft_line("llama-8b-lora", "survive, undisturbed", 1, device_name="A CARD", date="2026-11-21T01:00:00", versions={"torch": "2.11"})  # fmt: skip
    text = claims.section(claims.Results(dpo=[pair], survive=[survive]))
    assert text.startswith("## What must be shown: A CARD, 2026-11-21\n") and "`bench/card.py`; torch 2.11." in text


def test_what_needs_no_gpu_is_in_the_table_with_folders_that_exist(modules: dict[str, ModuleType]) -> None:
    claims = modules["claims"]
    table = claims.table(claims.Results())
    assert {issue for issue, *_ in claims.BY_TESTS} == {claim.issue for claim in claims.CLAIMS} == set(range(15, 21))
    for _, what, _, where in claims.BY_TESTS:
        assert f"| {what} |" in table and f"| {where} | no GPU |" in table
        assert all((BENCH.parent / path).exists() for path in where.split("`")[1::2] if "/" in path)
