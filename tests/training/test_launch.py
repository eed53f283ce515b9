"""The parent starts processes, passes signals on, outlives them and says one message. The workers here are real, and small."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brimful.training import launch
from brimful.training.launch import Outcome, supervise
from brimful.training.run import RunLock, open_run
from brimful.training.stop import STOP_SIGNALS

HEAD = "import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"
WORKER = (
    HEAD
    + "from brimful.errors import BadData, ProcessLost, TaskError\nfrom brimful.training.launch import has_parent, worker\n"
)
SAVES = (
    HEAD
    + """
got = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: got.append(signal.Signals(number).name))
Path(f"ready-{rank}").write_text(str(os.getpid()))
until = time.monotonic() + 60
while not got and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(float(os.environ.get("SAVE_S", 0.1)))
Path(f"saved-{rank}").write_text(" ".join(got))
"""
)
"""A worker that trains until it is asked to stop, takes a while to save, and writes which signals it got."""

PARENT = """
import os, sys
from pathlib import Path
from brimful.training.launch import supervise
from brimful.training.run import RunLock
lock = RunLock(Path("run"))
out = supervise([sys.executable, "worker.py"], processes=int(sys.argv[1]), environment=os.environ, reports=Path("job"), lock_file=lock.fd)
print(out.message, file=sys.stderr)
sys.exit(out.code)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _signals_are_restored():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.fixture(autouse=True)
def _quiet_kernel(monkeypatch):
    """Another job on this machine may run out of memory just now."""
    monkeypatch.setattr(launch, "oom_kills", lambda: 2)


def run(script: str, processes: int = 2, **options) -> Outcome:
    options = {"environment": os.environ, "reports": Path("job")} | options
    return supervise([sys.executable, "-S", "-c", script], processes=processes, **options)


def run_worker(body: str, processes: int = 2) -> Outcome:
    """With `worker()` around the body, as a training process has it."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    command = [sys.executable, "-c", f"{WORKER}with worker():\n{lines}"]
    return supervise(command, processes=processes, environment=os.environ, reports=Path("job"))


def pid_of(rank: int) -> int:
    return int(Path(f"pid-{rank}").read_text())


def start(script: str, processes: int = 2) -> subprocess.Popen:
    """A parent of its own, in the foreground group of a terminal as it were, whose signals are not ignored."""

    def default_signals():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    Path("worker.py").write_text(script)
    command = [sys.executable, "-c", PARENT, str(processes)]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=default_signals
    )


def wait_for(*names: str) -> None:
    until = time.monotonic() + 30
    while not all(Path(name).exists() and Path(name).read_text() for name in names):
        assert time.monotonic() < until, f"{names} are missing"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_alive(pid)


def test_every_process_knows_its_rank(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    script = HEAD + "Path(f'place-{rank}').write_text(repr(dict(os.environ)))"
    assert run(script, processes=3, environment={"PATH": os.environ["PATH"], "MINE": "x"}) == Outcome(code=0)
    places = [eval(Path(f"place-{rank}").read_text()) for rank in range(3)]
    assert [(place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) for place in places] == [
        (str(rank), str(rank), "3") for rank in range(3)
    ]
    assert len({place["MASTER_PORT"] for place in places}) == 1
    assert all(place["MINE"] == "x" and int(place["OMP_NUM_THREADS"]) >= 1 for place in places)


def test_threads_that_were_set_are_kept():
    script = HEAD + "sys.exit(os.environ['OMP_NUM_THREADS'] != '1')"
    assert run(script).code == 0


def test_one_that_is_killed_is_named_and_the_others_are_ended():
    script = HEAD + "Path(f'pid-{rank}').write_text(str(os.getpid()))\n"
    script += "while len(list(Path().glob('pid-*'))) < 3: time.sleep(0.01)\n"
    outcome = run(script + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", processes=3)
    assert outcome.code == 1 and outcome.resumable
    assert outcome.message == (
        f"process 1 of 3 (pid {pid_of(1)}) was killed by SIGKILL (not by the kernel's out-of-memory killer); "
        "the other processes were ended"
    )
    assert gone(pid_of(0)) and gone(pid_of(2))


def test_one_process_is_not_numbered():
    outcome = run(HEAD + "Path('pid-0').write_text(str(os.getpid()))\nos._exit(7)", processes=1)
    assert outcome.message == f"the training process (pid {pid_of(0)}) ended with exit code 7"
    assert outcome.code == 1 and outcome.resumable


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_that_all_processes_find_is_printed_once(processes):
    outcome = run_worker("time.sleep(0.2 * rank)\nraise BadData('x.jsonl,\\n line 7: no prompt.')", processes)
    assert outcome == Outcome(code=2, message="x.jsonl, line 7: no prompt.", error_code="B201")


@pytest.mark.parametrize("wanted", ["", "1"])
def test_the_traceback_of_a_users_own_code_is_offered_or_shown(wanted, monkeypatch, capfd):
    monkeypatch.setenv("BRIMFUL_TRACEBACK", wanted)
    body = "try: {}['zzz']\nexcept KeyError as error: raise TaskError(f'collate() failed: {error}.') from error"
    outcome = run_worker(body, processes=1)
    hint = " Add --traceback to see the traceback."
    assert outcome == Outcome(code=2, message=f"collate() failed: 'zzz'.{'' if wanted else hint}", error_code="B202")
    assert ("Traceback" in capfd.readouterr().err) == bool(wanted)


def test_an_error_that_came_from_another_process_is_printed_once_with_the_hint(monkeypatch):
    monkeypatch.delenv("BRIMFUL_TRACEBACK", raising=False)
    outcome = run_worker("raise TaskError('loss() failed.') from (None if rank else KeyError('ids'))")
    assert outcome == Outcome(code=2, message="loss() failed. Add --traceback to see the traceback.", error_code="B202")


def test_a_mistake_that_one_process_finds_names_it(monkeypatch):
    monkeypatch.setattr(launch, "SAME_MISTAKE_S", 0.3)
    outcome = run_worker("if rank: raise BadData('line 7 is bad')\ntime.sleep(60)")
    assert outcome.code == 2
    assert outcome.message.startswith("process 1 of 2 (pid ")
    assert outcome.message.endswith(") failed: line 7 is bad; the other processes were ended")


def test_a_process_that_lost_a_peer_is_not_the_cause():
    outcome = run_worker("if rank: time.sleep(0.2); os._exit(3)\nraise ProcessLost('no answer')")
    assert "process 1 of 2" in outcome.message and "ended with exit code 3" in outcome.message
    assert outcome.code == 1


def test_one_that_left_early_is_the_cause_if_its_peer_misses_it():
    outcome = run_worker("if rank: os._exit(0)\ntime.sleep(0.2); raise ProcessLost('no answer')")
    assert "process 1 of 2" in outcome.message and "ended before the others" in outcome.message


def test_a_job_that_lost_a_process_elsewhere_is_not_a_mistake():
    outcome = run_worker("raise ProcessLost('no answer')")
    assert outcome.code == 1
    assert outcome.message.endswith(") failed: no answer; the other processes were ended")


def test_the_peers_of_a_failed_process_may_leave_in_order():
    script = (
        HEAD
        + "signal.signal(signal.SIGTERM, lambda *_: (Path('left').touch(), os._exit(0)))\nPath(f'up-{rank}').touch()\n"
    )
    script += "while not Path('up-0').exists(): time.sleep(0.01)\nif rank: sys.exit(3)\ntime.sleep(60)"
    assert "process 1 of 2" in run(script).message
    assert Path("left").exists()


def test_a_traceback_is_printed_before_the_message(capfd):
    body = "import atexit\natexit.register(time.sleep, 0.3)\nif rank: raise ValueError('row 7')\ntime.sleep(60)"
    outcome = run_worker(body)
    assert outcome.code == 1 and not outcome.resumable
    assert outcome.message.endswith(") failed: ValueError: row 7; the other processes were ended")
    assert capfd.readouterr().err.rstrip().endswith("ValueError: row 7")


def test_a_failed_process_that_hangs_at_its_exit_is_ended(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    monkeypatch.setattr(launch, "TERMINATE_S", 0.2)
    body = "import atexit\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\natexit.register(time.sleep, 60)\nraise ValueError('row 7')"
    assert run_worker(body, processes=1).message.endswith("failed: ValueError: row 7")


def test_a_process_that_ignores_term_is_killed_when_another_fails(monkeypatch):
    monkeypatch.setattr(launch, "TERMINATE_S", 0.3)
    script = HEAD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nPath(f'pid-{rank}').write_text(str(os.getpid()))\n"
    script += "if rank == 0: time.sleep(60)\nwhile not Path('pid-0').exists(): time.sleep(0.01)\nsys.exit(3)"
    assert "ended with exit code 3" in run(script).message
    assert gone(pid_of(0))


def test_what_a_killed_process_had_started_is_killed_too():
    script = HEAD + "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    script += "Path('pid-0').write_text(str(child.pid))\nos.kill(os.getpid(), signal.SIGKILL)"
    assert run(script, processes=1).code == 1
    assert gone(pid_of(0))


@pytest.mark.parametrize(("after", "advice"), [(3, "lower --host-limit or --workers"), (2, None)])
def test_a_kernel_out_of_memory_kill_is_recognized(monkeypatch, after, advice):
    counts = iter([2, after])
    monkeypatch.setattr(launch, "oom_kills", lambda: next(counts))
    outcome = run(HEAD + "os.kill(os.getpid(), signal.SIGKILL)", processes=1)
    assert outcome.advice == advice and outcome.resumable
    assert ("host memory ran out (the kernel's out-of-memory counter went from 2 to 3)" in outcome.message) == bool(
        advice
    )


def test_a_worker_knows_its_parent_and_what_it_starts_does_not():
    inner = "from brimful.training.launch import has_parent; print(has_parent())"
    body = f"import subprocess\nout = subprocess.check_output([sys.executable, '-c', {inner!r}], text=True)\n"
    body += "Path('found').write_text(f'{has_parent()} {out}')"
    assert run_worker(body, processes=1).code == 0
    assert Path("found").read_text() == "True False\n"


def test_exit_codes_are_seen_where_the_end_of_a_child_is_ignored():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    outcome = run("raise SystemExit(7)", processes=1)
    signal.signal(signal.SIGCHLD, before)
    assert "ended with exit code 7" in outcome.message


def test_a_command_that_cannot_be_started_is_one_message():
    outcome = supervise(["./no-such-program"], processes=2, environment=os.environ, reports=Path("job"))
    assert outcome.code == 1
    assert outcome.message.startswith("the training processes could not be started: FileNotFoundError: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_reaches_every_worker_once_and_they_may_save(number):
    parent = start(SAVES)
    wait_for("ready-0", "ready-1")
    os.killpg(parent.pid, number)  # as a terminal does
    _, printed = parent.communicate(timeout=30)
    assert parent.returncode == 0
    assert [Path(f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM"] * 2
    assert printed.startswith("brimful: stopping after this step and saving a checkpoint")
    assert ("press Ctrl-C again to leave at once" in printed) == (number == signal.SIGINT)


def test_a_second_ctrl_c_leaves_at_once(monkeypatch):
    monkeypatch.setenv("SAVE_S", "60")
    parent = start(SAVES)
    wait_for("ready-0", "ready-1")
    parent.send_signal(signal.SIGTERM)
    assert "stopping" in parent.stderr.readline()
    parent.send_signal(signal.SIGINT)
    _, printed = parent.communicate(timeout=30)
    assert (parent.returncode, printed.startswith("stopped at once by a second Ctrl-C")) == (130, True)
    assert all(gone(int(Path(f"ready-{rank}").read_text())) for rank in (0, 1))


def test_a_second_term_waits_for_the_save():
    parent = start(SAVES, processes=1)
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
    _, printed = parent.communicate(timeout=30)
    assert (parent.returncode, printed.splitlines()[-1]) == (130, "stopped by Ctrl-C before there was anything to save")


def test_an_ignored_signal_stays_ignored():
    """nohup: the terminal is closed, and training continues."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcome = run(HEAD + "os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.1)", processes=1)
        assert (outcome, signal.getsignal(signal.SIGHUP)) == (Outcome(code=0), signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_parent_leaves_workers_that_save_and_a_run_that_is_locked_until_they_have(monkeypatch):
    monkeypatch.setenv("SAVE_S", "0.8")
    bound = "from brimful.training.launch import worker\nworker().__enter__()\n"
    parent = start(SAVES.replace("got = []", "got = []\n" + bound))
    wait_for("ready-0", "ready-1")
    parent.kill()
    parent.wait()
    with pytest.raises(Exception, match=f"started by pid {parent.pid}, which has ended"):
        RunLock(Path("run"))
    wait_for("saved-0", "saved-1")
    assert gone(int(Path("ready-0").read_text()))
    RunLock(Path("run")).close()


def test_resuming_waits_for_workers_that_save_after_their_parent_was_killed(monkeypatch):
    monkeypatch.setenv("SAVE_S", "0.8")
    bound = "from brimful.training.launch import worker\nworker().__enter__()\n"
    parent = start(SAVES.replace("got = []", "got = []\n" + bound))
    wait_for("ready-0", "ready-1")
    parent.kill()
    parent.wait()
    notes = []
    open_run(Path("run"), resume=True, may_begin=True, note=notes.append)
    assert Path("saved-0").exists()
    assert notes[0] == f"waiting for run: the run that pid {parent.pid} started was killed and is still saving"
    RunLock(Path("run")).close()


def test_a_worker_whose_parent_has_ended_already_stops():
    code = "from brimful.training.launch import worker\nwith worker(): print('trains')"
    environment = os.environ | {"BRIMFUL_PARENT": "1", "BRIMFUL_REPORTS": "."}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, b"")


def test_the_parent_is_small_and_without_torch():
    code = (
        "import brimful.training.launch, brimful.training.run, brimful.training.options, resource, sys;"
        "brimful.training.options.TrainOptions(mix='window:5', time_limit='8h');"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)));"
        "import brimful.cli.app; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\nFalse\n", done.stderr
