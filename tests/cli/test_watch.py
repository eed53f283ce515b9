"""`brimful watch` as people use it: in a terminal that is resized, with keys and signals, in tmux, in a pipe."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from brimful.cli.app import main
from brimful.training.events import FORMAT
from tests.report.fake_runs import step_event, write_run
from tests.report.watch.tiny_terminal import Terminal

SIZES = [(80, 24), (200, 60)]


def running(folder, **values):
    start = datetime.now(UTC) - timedelta(seconds=95)
    parts = {"steps": 300, "done": 200, "ooms": [120], "evals": [100], "checkpoints": [100], "running": True}
    return write_run(folder, **{**parts, "start": start, **values})


def ended(folder, **values):
    parts = {"steps": 300, "done": 200, "ooms": [120], "evals": [100], "checkpoints": [100], "end": "interrupted"}
    return write_run(folder, **{**parts, **values})


def train_on(folder, step):
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**step_event(step, steps=300), "time": now}) + "\n")


def run(*tokens, capsys):
    code = 0
    try:
        main(["watch", *map(str, tokens)])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- In a terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "lines"), SIZES)
@pytest.mark.parametrize(("make", "state"), [(running, "running"), (ended, "interrupted")])
def test_a_run_fills_a_terminal_and_q_quits(tmp_path, columns, lines, make, state):
    make(tmp_path / "first")
    with Terminal("watch", "first", columns=columns, lines=lines, cwd=tmp_path) as terminal:
        shown = terminal.wait_for("q quit")
        assert terminal.screen.second and terminal.screen.cursor_hidden
        assert len(shown) == lines and terminal.screen.widest <= columns
        assert f"● {state}  first" in "\n".join(shown) and "200/300" in "\n".join(shown)
        assert shown[-1].startswith("q quit")
        terminal.press("q")
        assert terminal.wait() == 0
        assert not terminal.screen.second and not terminal.screen.cursor_hidden
        assert terminal.mode == terminal.mode_before
        assert terminal.screen.text[0] == f"first: {state}, step 200"


def test_new_steps_appear(tmp_path):
    folder = running(tmp_path / "first")
    with Terminal("watch", str(folder)) as terminal:
        terminal.wait_for("200/300")
        train_on(folder, 201)
        terminal.wait_for("201/300")


def test_a_resize_draws_the_view_for_the_new_size(tmp_path):
    with Terminal("watch", str(running(tmp_path / "first")), columns=80, lines=24) as terminal:
        terminal.wait_for("q quit")
        terminal.resize(200, 60)
        shown = terminal.wait_for(lambda screen: screen.text[59].startswith("q quit"))
        assert "peak memory, reserved" in "\n".join(shown)
        terminal.resize(50, 12)
        shown = terminal.wait_for(lambda screen: screen.text[11].startswith("q quit") and screen.widest <= 50)
        assert shown[0].startswith("● running  first")
        terminal.press("q")
        assert terminal.wait() == 0


def test_p_pauses_and_goes_on(tmp_path):
    folder = running(tmp_path / "first")
    with Terminal("watch", str(folder)) as terminal:
        terminal.wait_for("p pause")
        terminal.press("p")
        terminal.wait_for("PAUSED")
        train_on(folder, 201)
        time.sleep(1.5)
        assert "200/300" in "\n".join(terminal.settle())
        terminal.press("p")
        terminal.wait_for("201/300")


def test_only_lines_that_change_are_written(tmp_path):
    """An ended run does not change, so nothing is written; over ssh that matters."""
    with Terminal("watch", str(ended(tmp_path / "first"))) as terminal:
        terminal.wait_for("q quit")
        terminal.settle()
        before = terminal.bytes_read
        time.sleep(2.5)
        terminal.settle()
        assert terminal.bytes_read == before


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "SIGHUP"])
def test_however_it_ends_the_terminal_is_restored(tmp_path, how):
    with Terminal("watch", str(running(tmp_path / "first"))) as terminal:
        terminal.wait_for("q quit")
        assert terminal.mode != terminal.mode_before
        if how == "Ctrl-C":
            terminal.press("\x03")
        else:
            terminal.signal(getattr(signal, how))
        code = terminal.wait()
        assert code == (0 if how == "Ctrl-C" else 128 + getattr(signal, how))
        assert not terminal.screen.second and not terminal.screen.cursor_hidden
        assert terminal.mode == terminal.mode_before
        assert "Traceback" not in "\n".join(terminal.screen.text)


def test_ctrl_z_gives_the_terminal_back_and_fg_the_view(tmp_path):
    with Terminal("watch", str(running(tmp_path / "first"))) as terminal:
        terminal.wait_for("q quit")
        switched = []
        real = terminal.screen.write
        terminal.screen.write = lambda text: (switched.append("\x1b[?1049l" in text), real(text))
        terminal.press("\x1a")  # without a shell nothing stops the program, so it goes on at once
        terminal.settle()
        assert any(switched) and terminal.screen.second and "q quit" in "\n".join(terminal.screen.text)
        terminal.press("q")
        assert terminal.wait() == 0 and terminal.mode == terminal.mode_before


def test_an_ended_run_that_is_resumed_is_watched_again(tmp_path):
    folder = ended(tmp_path / "first")
    with Terminal("watch", str(folder)) as terminal:
        terminal.wait_for("To continue: brimful train --run")
        running(folder)
        terminal.wait_for("● running")


def test_the_newest_run_is_followed(tmp_path):
    running(tmp_path / "runs" / "one")
    os.utime(tmp_path / "runs" / "one" / "lock", (1, 1))
    with Terminal("watch", cwd=tmp_path) as terminal:
        terminal.wait_for("● running  one")
        running(tmp_path / "runs" / "two")
        terminal.wait_for("● running  two")
        terminal.wait_for("a newer run has begun; before it this was runs/one")


def test_a_run_that_is_prepared_is_waited_for(tmp_path):
    folder = tmp_path / "first"
    write_run(tmp_path / "made", steps=300, done=0, running=True)
    folder.mkdir()
    shutil.copy(tmp_path / "made" / "lock", folder / "lock")
    with Terminal("watch", str(folder)) as terminal:
        terminal.wait_for("● preparing  first")
        running(folder)
        terminal.wait_for("● running  first")


def test_keys_that_mean_nothing_are_ignored(tmp_path):
    with Terminal("watch", str(running(tmp_path / "first"))) as terminal:
        terminal.wait_for("q quit")
        terminal.press("\x1b[A\x1b[Bx\n")
        terminal.settle()
        assert terminal.process.poll() is None
        terminal.press("q")
        assert terminal.wait() == 0


def test_no_color_means_none(tmp_path):
    with Terminal("watch", str(running(tmp_path / "first")), environment={"NO_COLOR": "1"}) as terminal:
        written = []
        real = terminal.screen.write
        terminal.screen.write = lambda text: (written.append(text), real(text))
        terminal.wait_for("q quit")
        codes = {code for text in written for code in re.findall(r"\x1b\[([\d;]*)m", text)}
        assert not any(30 <= int(part) <= 107 for code in codes for part in code.split(";") if part)


def test_chinese_in_a_terminal_keeps_its_width(tmp_path):
    folder = running(tmp_path / "第一次 训练")
    with Terminal("watch", str(folder), environment={"BRIMFUL_LANG": "zh"}) as terminal:
        shown = terminal.wait_for("q 退出")
        assert terminal.screen.widest <= 80 and "● 训练中  第一次 训练" in shown[0]


def test_a_dumb_terminal_gets_one_frame(tmp_path):
    with Terminal("watch", str(running(tmp_path / "first")), environment={"TERM": "dumb"}) as terminal:
        assert terminal.wait() == 0
        shown = "\n".join(terminal.screen.text)
        assert not terminal.screen.second and "running" in shown and "200/300" in shown


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_in_tmux_the_view_leaves_no_trace(tmp_path, columns, lines):
    folder = running(tmp_path / "first")
    server = ["tmux", "-L", f"brimful-{os.getpid()}-{columns}", "-f", "/dev/null"]

    def tmux(*arguments):
        return subprocess.run([*server, *arguments], capture_output=True, text=True, timeout=60).stdout

    def wait_for(text):
        end = time.monotonic() + 60
        while text not in (shown := tmux("capture-pane", "-p", "-t", "w")):
            assert time.monotonic() < end, shown
            time.sleep(0.1)
        return shown

    environment = f"PYTHONPATH={os.pathsep.join(sys.path)} LANG=en_US.UTF-8 PYTHONIOENCODING=utf-8 LC_ALL="
    try:
        tmux("new-session", "-d", "-s", "w", "-x", str(columns), "-y", str(lines), "-e", "LC_ALL=C.UTF-8", "sh")
        tmux("send-keys", "-t", "w", f"env {environment} {sys.executable} -m brimful watch {folder}", "Enter")
        shown = wait_for("q quit")
        assert "● running  first" in shown and len(shown.splitlines()) == lines
        tmux("resize-window", "-t", "w", "-x", "150", "-y", "40")
        assert "peak memory, reserved" in wait_for("╭─ memory")
        tmux("send-keys", "-t", "w", "q")
        shown = wait_for(f"{folder}: running, step 200")
        assert "╭" not in shown and "GPU 0" not in shown
    finally:
        tmux("kill-server")


# ---- Elsewhere -------------------------------------------------------------------------------------------------------


def test_once_prints_a_frame(tmp_path, capsys):
    code, out, err = run(running(tmp_path / "first"), "--once", capsys=capsys)
    assert (code, err) == (0, "") and "● running  first" in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_in_a_pipe_it_is_like_once(tmp_path, capsys):
    code, out, _ = run(ended(tmp_path / "first"), capsys=capsys)
    assert code == 0 and "● interrupted  first" in out and "To continue: brimful train --run" in out


def test_json_is_one_object(tmp_path, capsys):
    code, out, _ = run(running(tmp_path / "first"), "--once", "--json", capsys=capsys)
    content = json.loads(out)
    assert code == 0 and (content["state"], content["step"], content["ooms_survived"]) == ("running", 200, 1)
    assert content["cards"][0]["label"] == "GPU 0" and content["ram"]["workers"] == 2


def test_it_starts_without_torch(tmp_path):
    folder = running(tmp_path / "first")
    script = (
        "import sys, brimful.cli\nbrimful.cli.main(['watch', sys.argv[1], '--once'])\n"
        "assert not {'torch', 'numpy', 'pyarrow', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk"])
def test_an_encoding_without_blocks_gets_ascii(tmp_path, encoding):
    folder = running(tmp_path / "第一次")
    done = subprocess.run(
        [sys.executable, "-m", "brimful", "watch", str(folder), "--once"],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding, "BRIMFUL_LANG": "en"},
    )  # fmt: skip
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert "#" in done.stdout.decode(encoding) and "█" not in done.stdout.decode(encoding)


@pytest.mark.parametrize("every", ["0.5", "0", "-3", "nan"])
def test_looking_more_than_once_a_second_is_refused(tmp_path, every, capsys):
    code, _, err = run(running(tmp_path / "first"), "--once", "--every", every, capsys=capsys)
    assert code == 2 and "must be at least 1" in err and "--every" in err


def make_bad(folder: Path, kind: str) -> Path:
    run_folder = folder / "a 坏 run"
    if kind == "no runs":
        return folder / "nowhere"
    if kind == "a file":
        run_folder.write_text("x")
    elif kind == "an empty folder":
        run_folder.mkdir()
    elif kind == "newer":
        write_run(run_folder, steps=3)
        (run_folder / "events.jsonl").write_text(json.dumps({"event": "begin", "step": 0, "format": FORMAT + 1}) + "\n")
    return run_folder


@pytest.mark.parametrize("kind", ["no runs", "a file", "an empty folder", "newer"])
def test_what_is_no_run_is_one_sentence(tmp_path, kind, capsys):
    code, _, err = run(make_bad(tmp_path, kind), capsys=capsys)
    assert code == 2 and err.startswith("brimful: error") and "Try: " in err and len(err.splitlines()) == 1


def test_without_any_run_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys=capsys)
    assert code == 2 and "runs/ has no run" in err


@pytest.mark.parametrize("kind", ["binary", "partial", "only run.json", "no plan", "not a number"])
def test_a_damaged_run_is_shown_as_far_as_it_goes(tmp_path, kind, capsys):
    folder = running(tmp_path / "a 坏 run", done=20, ooms=[], evals=[], checkpoints=[])
    events = folder / "events.jsonl"
    if kind == "binary":
        events.write_bytes(os.urandom(5000) + b"\n" + events.read_bytes())
    elif kind == "partial":
        events.write_bytes(events.read_bytes()[:-300])
    elif kind == "only run.json":
        events.unlink()
    elif kind == "no plan":
        (folder / "plan.json").unlink()
        events.write_text("".join(line for line in events.open() if '"plan"' not in line[:20]))
    else:
        train_on(folder, 21)
        events.write_text(events.read_text().replace('"loss": ', '"loss_is": "nan", "loss": null, "was": '))
    code, out, err = run(folder, "--once", capsys=capsys)
    assert (code, err) == (0, "") and "a 坏 run" in out
    assert run(folder, "--once", "--json", capsys=capsys)[0] == 0


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("--help", capsys=capsys)
    flags = {word.strip("│ ,[].") for word in out.split() if word.startswith("--")}
    assert flags - {"--traceback", "--lang"} == {"--once", "--json", "--every", "--ascii"}


@pytest.mark.torture
def test_a_million_events(tmp_path):
    """Prints the figures; `test_a_long_run_costs_no_more_than_a_short_one` asserts what does not depend on the machine."""
    folder = write_run(tmp_path / "long", steps=1_000_000, done=1, ooms=[1], running=True)
    line = json.dumps({"time": "2026-01-31T09:00:00.000Z", **step_event(1, steps=1_000_000)})
    line = '{"event": "step", ' + line[1:].replace('"event": "step", ', "", 1).replace('"step": 1,', '"step": %d,', 1) + "\n"  # fmt: skip
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        for first in range(2, 1_000_000, 10_000):
            file.write("".join(line % step for step in range(first, min(first + 10_000, 1_000_001))))
    script = (
        "import sys, time\nfrom pathlib import Path\nimport brimful.cli.app\nstart, cpu = time.perf_counter(), time.process_time()\n"
        "brimful.cli.app.main(['watch', sys.argv[1], '--once'])\n"
        "peak = next(int(line.split()[1]) / 1024 for line in Path('/proc/self/status').open() if line.startswith('VmHWM'))\n"
        "print(f'{time.perf_counter() - start:.2f} s, {time.process_time() - cpu:.2f} s of CPU, {peak:.0f} MiB', file=sys.stderr)"
    )
    size = (folder / "events.jsonl").stat().st_size / 1e6
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
        assert done.returncode == 0 and "1,000,000/1,000,000" in done.stdout
        print(f"\nwatch --once of 1,000,000 events ({size:.0f} MB): {done.stderr.strip()}", end="")
