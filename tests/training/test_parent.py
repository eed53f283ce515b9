"""The parent starts processes, passes signals on, outlives them and says one sentence. The workers here are real, and small."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brimful.training import launch as parent_module
from brimful.training import sidecar as sidecar_module
from brimful.training.launch import Outcome, keep_hours, supervise
from brimful.training.run import RunLock
from brimful.training.stop import Window
from brimful.training.supervise import alive, identity

HEAD = "import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"
WATCHED = HEAD + "from brimful.errors import BadData, ProcessLost\nfrom brimful.train import supervise\n"
WATCHED += "watch = supervise.watch(rank, int(os.environ['WORLD_SIZE']))\n"
POLITE = (
    HEAD
    + """
got = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: got.append(signal.Signals(number).name))
Path(f"ready-{rank}").write_text(str(os.getpid()))
until = time.monotonic() + 60
while not got and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(float(os.environ.get("SAVE_S", 0.3)))
Path(f"saved-{rank}").write_text(" ".join(got))
"""
)
"""A worker that trains until it is asked to stop, takes a while to save, and tells which signals it got."""

RUN = """
import os, sys
from pathlib import Path
from brimful.training.launch import supervise
from brimful.training.run import RunLock
lock = RunLock(Path("run"))
out = supervise([sys.executable, "worker.py"], processes=int(sys.argv[1]), environment=os.environ, job=Path("job"), lock_file=lock.fd)
print(out.sentence, file=sys.stderr)
sys.exit(out.code)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")


@pytest.fixture(autouse=True)
def box(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture(autouse=True)
def _signals_are_put_back():
    before = {number: signal.getsignal(number) for number in sidecar_module.POLITE}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.fixture(autouse=True)
def _quiet_kernel(monkeypatch):
    """Another job on this box may run out of memory just now."""
    monkeypatch.setattr(sidecar_module, "oom_kills", lambda: 2)


def end(script: str, processes: int = 2, **how) -> Outcome:
    how = {"environment": os.environ, "job": Path("job")} | how
    return supervise([sys.executable, "-c", script], processes=processes, **how)


def pid_of(rank: int) -> int:
    return int(Path(f"pid-{rank}").read_text())


def start(script: str, processes: int = 2) -> subprocess.Popen:
    """A parent of its own, in the foreground group of a terminal as it were, whose signals are not ignored."""

    def heed():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    Path("worker.py").write_text(script)
    command = [sys.executable, "-c", RUN, str(processes)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed)


def wait_for(*names: str) -> None:
    until = time.monotonic() + 30
    while not all(Path(name).exists() and Path(name).read_text() for name in names):
        assert time.monotonic() < until, f"{names} are not there"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while (there := alive(identity(pid))) and time.monotonic() < until:
        time.sleep(0.01)
    return not there


def test_every_process_knows_its_place():
    script = HEAD + "Path(f'place-{rank}').write_text(repr(dict(os.environ)))"
    assert end(script) == Outcome(code=0)
    first, second = (eval(Path(f"place-{rank}").read_text()) for rank in (0, 1))
    named = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "BRIMFUL_PARENT")
    assert [first[name] for name in named] == ["0", "0", "2", "2", "127.0.0.1", str(os.getpid())]
    assert [second[name] for name in named] == ["1", "1", "2", "2", "127.0.0.1", str(os.getpid())]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "0"


@pytest.mark.parametrize(
    ("processes", "asked", "threads"),
    [(2, {}, "3"), (2, {"OMP_NUM_THREADS": "5"}, "5"), (1, {}, "unset"), (9, {}, "1")],
)
def test_processes_share_the_cores_unless_told_otherwise(monkeypatch, processes, asked, threads):
    monkeypatch.setattr(parent_module.Host, "detect", lambda: type("Host", (), {"cores": 7}))
    parent = parent_module.Parent(["x"], processes=processes, environment=asked, job=Path("job"))
    assert parent._places(0, 1).get("OMP_NUM_THREADS", "unset") == threads


def test_a_killed_process_ends_the_others_and_is_named():
    script = HEAD + "Path(f'pid-{rank}').write_text(str(os.getpid()))\n"
    script += "while len(list(Path().glob('pid-*'))) < 3: time.sleep(0.01)\n"
    outcome = end(script + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", processes=3)
    assert outcome.code == 1
    assert outcome.sentence == (
        f"process 1 of 3 (pid {pid_of(1)}) was killed by SIGKILL (nothing in the kernel's out-of-memory count); "
        "the other processes were ended; --resume goes on from the last checkpoint"
    )
    assert gone(pid_of(0)) and gone(pid_of(2))


def test_one_process_is_not_numbered():
    outcome = end(HEAD + "Path('pid-0').write_text(str(os.getpid()))\nos._exit(7)", processes=1)
    text = f"the training process (pid {pid_of(0)}) left with exit code 7; --resume goes on from the last checkpoint"
    assert outcome == Outcome(code=1, sentence=text)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_that_all_processes_find_is_said_once(processes):
    script = WATCHED + "time.sleep(0.4 * rank)\nwatch.fail(BadData('x.jsonl,\\n line 7: no prompt.'))\nsys.exit(2)"
    assert end(script, processes) == Outcome(code=2, sentence="x.jsonl, line 7: no prompt.")


def test_a_mistake_that_one_process_finds_names_it(monkeypatch):
    monkeypatch.setattr(parent_module, "_SAME_S", 0.3)
    outcome = end(WATCHED + "if rank: watch.fail(BadData('line 7 is bad')); sys.exit(2)\ntime.sleep(60)")
    assert outcome.code == 2
    assert outcome.sentence.startswith("process 1 of 2 (pid ")
    assert outcome.sentence.endswith(") failed: line 7 is bad; the other processes were ended")


def test_who_lost_a_peer_is_not_the_cause():
    outcome = end(WATCHED + "if rank: time.sleep(0.2); os._exit(3)\nwatch.fail(ProcessLost('no answer')); sys.exit(2)")
    assert "process 1 of 2" in outcome.sentence and "left with exit code 3" in outcome.sentence
    assert outcome.code == 1


def test_a_job_that_lost_a_process_elsewhere_is_no_mistake():
    outcome = end(WATCHED + "watch.fail(ProcessLost('no answer')); sys.exit(2)")
    assert outcome.code == 1
    assert outcome.sentence.endswith(") failed: no answer; the other processes were ended")


def test_the_peers_of_a_failed_process_may_leave_in_order():
    script = (
        HEAD
        + "signal.signal(signal.SIGTERM, lambda *_: (Path('left').touch(), os._exit(0)))\nPath(f'there-{rank}').touch()\n"
    )
    script += "while not Path('there-0').exists(): time.sleep(0.01)\nif rank: sys.exit(3)\ntime.sleep(60)"
    assert "process 1 of 2" in end(script).sentence
    assert Path("left").exists()


def test_a_traceback_is_printed_before_the_sentence_is_found(capfd):
    slow = "try:\n with watch:\n  if rank: raise ValueError('row 7')\n  time.sleep(60)\nexcept ValueError: time.sleep(0.4); raise"
    outcome = end(WATCHED + slow)
    assert outcome.code == 1
    assert outcome.sentence.endswith(") failed: ValueError: row 7; the other processes were ended")
    assert capfd.readouterr().err.rstrip().endswith("ValueError: row 7")


def test_a_process_that_ignores_term_is_killed_when_another_fails(monkeypatch):
    monkeypatch.setattr(sidecar_module, "_TERM_S", 0.3)
    script = HEAD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nPath(f'pid-{rank}').write_text(str(os.getpid()))\n"
    script += "if rank == 0: time.sleep(60)\nwhile not Path('pid-0').exists(): time.sleep(0.01)\nsys.exit(3)"
    assert "left with exit code 3" in end(script).sentence
    assert gone(pid_of(0))


def test_what_a_killed_process_had_started_is_killed_too():
    script = HEAD + "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    script += "Path('pid-0').write_text(str(child.pid))\nos.kill(os.getpid(), signal.SIGKILL)"
    assert end(script, processes=1).code == 1
    assert gone(pid_of(0))


@pytest.mark.parametrize(("after", "told"), [(3, True), (2, False)])
def test_a_kernel_out_of_memory_kill_says_what_helps(monkeypatch, after, told):
    counts = iter([2, after])
    monkeypatch.setattr(sidecar_module, "oom_kills", lambda: next(counts))
    sentence = end(HEAD + "os.kill(os.getpid(), signal.SIGKILL)", processes=1).sentence
    words = (
        ") was killed by SIGKILL: host memory ran out (the kernel's out-of-memory count went from 2 to 3); "
        "lower --host-limit or --workers; --resume goes on from the last checkpoint"
    )
    assert sentence.endswith(words) == told
    assert sentence.endswith("; --resume goes on from the last checkpoint")


def test_supervised_processes_start_no_sidecar(box):
    script = (
        WATCHED + "Path(f'found-{rank}').write_text(repr((supervise.has_parent(), list(Path().glob('brimful-*')))))"
    )
    assert end(script).code == 0
    assert [Path(f"found-{rank}").read_text() for rank in (0, 1)] == ["(True, [])"] * 2


def test_a_program_that_a_worker_starts_is_nobodys_worker():
    inner = "from brimful.training.supervise import has_parent; open('found', 'w').write(str(has_parent()))"
    assert end(HEAD + f"import subprocess\nsubprocess.run([sys.executable, '-c', {inner!r}])", processes=1).code == 0
    assert Path("found").read_text() == "False"


def test_the_end_is_that_of_the_journal_if_this_start_wrote_one(box):
    events = box / "events.jsonl"
    line = json.dumps({"event": "end", "reason": "window", "sentence": "paused"})
    assert end("", processes=1, events=events) == Outcome(code=0)
    events.write_text(line + "\n")
    assert end(f"open({str(events)!r}, 'a').write('{{}}\\n')", processes=1, events=events) == Outcome(code=0)
    write = f"open({str(events)!r}, 'a').write({line!r} + '\\n')"
    assert end(write, processes=1, events=events) == Outcome(code=0, sentence="paused", reason="window")


def test_a_run_that_had_said_its_end_when_it_was_stopped_has_ended_well(box):
    line = json.dumps({"event": "end", "reason": "interrupted", "sentence": "saved"})
    script = (
        HEAD
        + f"open('events.jsonl', 'a').write({line!r} + '\\n')\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    outcome = end(script, processes=1, events=box / "events.jsonl", say=lambda sentence: None)
    assert outcome == Outcome(code=0, sentence="saved", reason="interrupted")


def test_marks_of_an_earlier_set_do_not_count(box):
    (box / "job").mkdir()
    (box / "job/rank-0").write_text('{"rank": 0}\n{"said": "failed: x", "blame": 0, "at": 0, "mistake": "x"}\n')
    assert end("", processes=1).code == 0


def test_exit_codes_are_seen_where_the_end_of_a_child_is_ignored():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    outcome = end("raise SystemExit(7)", processes=1)
    signal.signal(signal.SIGCHLD, before)
    assert "left with exit code 7" in outcome.sentence


def test_a_command_that_cannot_be_started_is_one_sentence():
    outcome = supervise(["./no-such-program"], processes=2, environment=os.environ, job=Path("job"))
    assert outcome.code == 1
    assert outcome.sentence.startswith("the training processes could not be started: FileNotFoundError: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_polite_signal_reaches_every_worker_once_and_they_may_save(number):
    parent = start(POLITE)
    wait_for("ready-0", "ready-1")
    os.killpg(parent.pid, number)  # as a terminal does
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == 0
    assert [Path(f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM"] * 2
    assert said.startswith("brimful: stopping: saving a checkpoint")
    assert ("press Ctrl-C again to leave at once" in said) == (number == signal.SIGINT)


def test_a_second_ctrl_c_leaves_at_once(monkeypatch):
    monkeypatch.setenv("SAVE_S", "60")
    parent = start(POLITE)
    wait_for("ready-0", "ready-1")
    parent.send_signal(signal.SIGTERM)
    assert "stopping" in parent.stderr.readline()
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=30)
    assert (parent.returncode, said.startswith("stopped at once by a second Ctrl-C")) == (130, True)
    assert all(gone(int(Path(f"ready-{rank}").read_text())) for rank in (0, 1))


def test_a_second_term_waits_for_the_save():
    parent = start(POLITE, processes=1)
    wait_for("ready-0")
    parent.send_signal(signal.SIGTERM)
    assert "stopping" in parent.stderr.readline()
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=30) == 0
    assert Path("saved-0").read_text() == "SIGTERM"


def test_a_worker_that_cannot_save_yet_is_stopped_all_the_same():
    parent = start(HEAD + "Path(f'ready-{rank}').write_text('x')\ntime.sleep(60)")
    wait_for("ready-0", "ready-1")
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=30)
    assert (parent.returncode, said.splitlines()[-1]) == (130, "stopped by Ctrl-C before there was anything to save")


def test_a_signal_before_the_start_is_passed_on_after_it(monkeypatch):
    parent = parent_module.Parent(["sleep", "60"], processes=2, environment=os.environ, job=Path("job"), say=print)
    parent.heed(signal.SIGTERM, None)
    parent.start()
    assert parent.run() == Outcome(code=143, sentence="stopped by SIGTERM before there was anything to save")
    parent.kill()


def test_nobody_is_asked_twice():
    parent = parent_module.Parent([], processes=1, environment={}, job=Path("job"), say=print)
    worker = parent.members["rank-0"] = parent_module._Worker(type("Process", (), {"pid": 1}), 0, 1)
    sent = []
    worker.send = sent.append
    parent.heed(signal.SIGTERM, None)
    parent._ask_to_stop()
    assert sent == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored(monkeypatch):
    """nohup: the terminal is closed, and training goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcome = end(HEAD + "os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.1)", processes=1)
        assert (outcome, signal.getsignal(signal.SIGHUP)) == (Outcome(code=0), signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_parent_leaves_workers_that_save_and_a_run_that_is_locked_until_they_have(monkeypatch):
    monkeypatch.setenv("SAVE_S", "0.8")
    bound = "from brimful.training.launch import bind_to_parent\nbind_to_parent()\n"
    parent = start(POLITE.replace("got = []", "got = []\n" + bound))
    wait_for("ready-0", "ready-1")
    parent.kill()
    parent.wait()
    with pytest.raises(Exception, match=f"started by pid {parent.pid}, which has ended"):
        RunLock(Path("run"))
    wait_for("saved-0", "saved-1")
    assert gone(int(Path("ready-0").read_text()))
    RunLock(Path("run")).close()


def test_a_worker_whose_parent_is_gone_before_it_looks_stops(monkeypatch):
    code = "from brimful.training.launch import bind_to_parent; bind_to_parent(); print('trains')"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"BRIMFUL_PARENT": "1"}, capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, b"")


def test_the_parent_is_small_and_without_torch():
    code = (
        "import brimful.training.launch, brimful.training.run, brimful.training.preflight, resource, sys;"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)));"
        "print(int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() < 30e6)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\nTrue\n"


class Hours:
    """A clock on the wall, in which sleeping is what passes time; `starts` are the endings of the run."""

    def __init__(self, now: str, starts: list[tuple[Outcome, float]]) -> None:
        self.now = time.mktime(time.strptime(f"2026-01-31 {now}", "%Y-%m-%d %H:%M"))
        self.starts, self.said, self.began = starts, [], []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self) -> Outcome:
        self.began.append(time.strftime("%d %H:%M", time.localtime(self.now)))
        outcome, hours = self.starts.pop(0)
        self.now += hours * 3600
        return outcome

    def keep(self, window: str) -> Outcome:
        return keep_hours(
            Window.parse(window), self.start, self.said.append, sleep=self.sleep, now=lambda: self.now
        )  # fmt: skip


PAUSED, FINISHED = Outcome(code=0, reason="window", sentence="paused"), Outcome(code=0, reason="finished")


def test_a_run_waits_for_its_window_and_goes_on_in_the_next_one():
    hours = Hours("15:00", [(PAUSED, 12), (FINISHED, 1)])
    assert hours.keep("21:00-09:00") == FINISHED
    assert hours.began == ["31 21:00", "01 21:00"]
    window = "the window is 21:00-09:00"
    assert hours.said == [f"waiting until 21:00: {window}", "paused", f"waiting until 21:00: {window}"]


def test_a_run_that_leaves_early_to_save_in_time_is_not_started_again_before_the_window_shuts():
    hours = Hours("21:00", [(PAUSED, 11.9), (FINISHED, 1)])
    assert hours.keep("21:00-09:00") == FINISHED
    assert hours.began == ["31 21:00", "01 21:00"]


@pytest.mark.parametrize("outcome", [Outcome(code=1, reason="window"), Outcome(code=0, reason="interrupted")])
def test_any_other_end_is_the_end(outcome):
    hours = Hours("22:00", [(outcome, 1)])
    assert (hours.keep("21:00-09:00"), hours.said) == (outcome, [])


def test_a_signal_while_nothing_runs_ends_the_wait():
    hours = Hours("15:00", [])
    hours.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGTERM)
    outcome = hours.keep("21:00-09:00")
    assert (outcome.code, outcome.reason, hours.began) == (0, "interrupted", [])
    assert outcome.sentence.startswith("stopped by SIGTERM while it waited for the window 21:00-09:00; --resume")
