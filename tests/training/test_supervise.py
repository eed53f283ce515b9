"""A death ends the job on its box, and the last line says whose it was.

Every run here reads stderr to its end, and the sidecar holds stderr: that the run returns is the proof that it has left.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.errors import BadOption
from brimful.training import sidecar as sidecar_module
from brimful.training import supervise
from brimful.training.sidecar import _Member, _Sidecar
from brimful.training.supervise import Blame

WATCH = """
import os, signal, sys, threading, time
from pathlib import Path
from brimful.train import sidecar as sidecar_module
from brimful.train import supervise

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
watch = supervise.watch(rank, world)
Path(f"joined-{rank}").write_text(str(os.getpid()))
while len(list(Path().glob("joined-*"))) < world:
    time.sleep(0.01)
time.sleep(0.2)
"""
"""What every process does: join, and go on when all have joined."""

LAUNCHER = """
import os, subprocess, sys, time

count, script, quiet = int(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["--redirects"]
for restart in range(1 + int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))):
    env = os.environ | {"TORCHELASTIC_RUN_ID": "fake", "TORCHELASTIC_RESTART_COUNT": str(restart)}
    workers = [
        subprocess.Popen(
            [sys.executable, script],
            env=env | {"RANK": str(rank), "WORLD_SIZE": str(count)},
            stderr=open(f"stderr-{rank}", "w") if quiet else None,
        )
        for rank in range(count)
    ]
    while not any(worker.poll() for worker in workers) and any(worker.poll() is None for worker in workers):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        time.sleep(0.3)
    if not any(worker.poll() for worker in workers):
        sys.exit(0)
    for worker in workers:
        worker.terminate()
        worker.wait()
time.sleep(0.5)
print("54 lines of the launcher", file=sys.stderr)
sys.exit(1)
"""
"""As torchrun: end the others, start again where allowed, talk. It is slow to collect, so that exit codes are seen."""

GLOO = """
import os, signal, time
from datetime import timedelta
from brimful.train import sidecar as sidecar_module
from brimful.train import supervise

supervise.watch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(days=1))
ones = torch.ones(1)
dist.all_reduce(ones)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(ones)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="exit codes of others are Linux's")


@pytest.fixture
def box(tmp_path, monkeypatch):
    """A folder to run in that is also the temporary one, so that a job's folder would be seen in it."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_"))]:
        monkeypatch.delenv(name)
    for name, value in {"TMPDIR": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def plain(script: str, count: int = 2) -> tuple[list[str], list[int]]:
    """Start the processes with nobody above them but this test; the lines they leave, and how each ended."""
    Path("worker.py").write_text(WATCH + script)
    output, pipe = os.pipe()
    started = [
        subprocess.Popen(
            [sys.executable, "worker.py"],
            stderr=pipe,
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)},
        )
        for rank in range(count)
    ]
    os.close(pipe)
    with os.fdopen(output) as lines:
        said = [line for line in lines.read().splitlines() if line.strip()]
    return said, [process.wait(timeout=30) for process in started]


def launched(script: str, *options: str, count: int = 2) -> list[str]:
    """Start them under a launcher that is called torchrun and does what it does; the lines of all."""
    Path("worker.py").write_text(WATCH + script)
    Path("torchrun").write_text(LAUNCHER)
    return run([sys.executable, "torchrun", str(count), "worker.py", *options])


def run(command: list[str], timeout_s: float = 60) -> list[str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
    return [line for line in done.stdout.splitlines() if line.strip()]


def marked(error: BaseException, second_hand: bool | None = None) -> dict[str, object]:
    """What a failing process writes into its file."""
    reading, writing = os.pipe()
    supervise.Watch(writing, os.getpid()).fail(error, second_hand=second_hand)
    os.close(writing)
    with os.fdopen(reading) as lines:
        return json.loads(lines.read())


def one_member(box: Path, *, pid: int = 1, world_size: int = 1) -> _Sidecar:
    sidecar = _Sidecar(box)
    more = {"rank": 0, "world_size": world_size, "launcher": None, "again": False}
    sidecar.members["rank-0"] = _Member(supervise.identity(pid) | more)
    return sidecar


def folders(box: Path) -> list[Path]:
    return list(box.glob("brimful-*"))


def pid_of(rank: int) -> int:
    return int(Path(f"joined-{rank}").read_text())


@pytest.mark.parametrize("end", ["", "os._exit(0)"])
def test_a_job_that_ends_well_says_nothing_and_leaves_nothing(box, end):
    said, codes = plain(f"time.sleep(0.3 * rank)\n{end}")
    assert (said, codes, folders(box)) == ([], [0, 0], [])


def test_a_killed_process_ends_the_others_and_is_named(box):
    said, codes = plain("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", count=3)
    assert said[-1].startswith(f"brimful: process 1 of 3 (pid {pid_of(1)}) was killed by SIGKILL (")
    assert said[-1].endswith("; the other processes were ended")
    assert (codes, folders(box)) == ([-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM], [])


def test_the_death_is_told_at_once_for_whoever_ends_with_the_launcher(box):
    said, _ = plain("if rank == 1: os._exit(7)\ntime.sleep(60)")
    assert said == [
        f"brimful: process 1 of 2 (pid {pid_of(1)}) left with exit code 7; ending the job on this box",
        f"brimful: process 1 of 2 (pid {pid_of(1)}) left with exit code 7; the other processes were ended",
    ]


def test_a_process_that_ignores_term_is_killed(box, monkeypatch):
    monkeypatch.setattr(sidecar_module, "_TERM_S", 0.3)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    process.stdout.readline()
    one_member(box, pid=process.pid).end_all()
    assert process.wait(timeout=30) == -signal.SIGKILL


def test_a_failed_process_that_hangs_at_its_exit_is_ended(box):
    said, codes = plain("if rank: threading.Thread(target=time.sleep, args=[60]).start(); 1 / 0\ntime.sleep(60)")
    assert "failed: ZeroDivisionError: division by zero;" in said[-1]
    assert codes == [-signal.SIGTERM, -signal.SIGTERM]


def test_an_exception_is_told_in_one_line_after_its_traceback(box):
    said, _ = plain("if rank: raise ValueError('row 7\\nis bad')\ntime.sleep(60)")
    assert said[0] == "Traceback (most recent call last):"
    assert said[-1].endswith(
        f"process 1 of 2 (pid {pid_of(1)}) failed: ValueError: row 7; the other processes were ended"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BadOption("--rows is 0;\n give 1 or more."), "failed: --rows is 0; give 1 or more"),
        (KeyError("ids"), "failed: KeyError: 'ids'"),
        (AssertionError(), "failed: AssertionError"),
        (KeyboardInterrupt(), "was interrupted"),
    ],
)
def test_a_process_says_in_one_line_why_it_fails(error, words):
    assert marked(error)["said"] == words


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (ValueError("row 7"), Blame.OWN),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), Blame.SECOND_HAND),
        (ConnectionResetError("Connection reset by peer"), Blame.SECOND_HAND),
        (type("ProcessLost", (BadOption,), {})("process 1 does not answer"), Blame.SECOND_HAND),
        (KeyboardInterrupt(), Blame.OUTSIDE),
    ],
)
def test_a_process_says_whether_its_failure_is_its_own(error, blame):
    assert marked(error)["blame"] == blame


def test_a_caller_who_knows_better_says_whether_a_failure_is_second_hand():
    assert marked(ValueError("no answer"), second_hand=True)["blame"] == Blame.SECOND_HAND


def test_an_exception_that_is_caught_above_is_told_too(box):
    said, _ = plain("try:\n with watch:\n  if rank: 1 / 0\n  time.sleep(60)\nexcept ZeroDivisionError: sys.exit(2)")
    assert said[-1].endswith(") failed: ZeroDivisionError: division by zero; the other processes were ended")


def test_who_fails_because_a_peer_is_gone_is_not_the_cause(box):
    said, _ = plain("if rank: time.sleep(0.2); os._exit(3)\nraise RuntimeError('Connection closed by peer')")
    assert said[-1].endswith(f"process 1 of 2 (pid {pid_of(1)}) left with exit code 3; the other processes were ended")


def test_a_process_that_left_early_is_the_cause_when_its_peer_misses_it(box):
    said, _ = plain("if rank: sys.exit()\ntime.sleep(0.3)\nraise ConnectionError('Connection reset by peer')")
    assert said[-1].endswith(f"process 1 of 2 (pid {pid_of(1)}) left early; the other processes were ended")


@pytest.mark.parametrize(("world_size", "there"), [(1, False), (8, True)])
def test_a_lost_connection_points_to_the_other_boxes_if_there_are_any(box, world_size, there):
    sidecar = one_member(box, world_size=world_size)
    sidecar.members["rank-0"].mark = marked(RuntimeError("Connection reset by peer"))
    assert ("look at the other boxes" in sidecar.cause()) == there


def test_the_sentence_comes_after_all_that_the_launcher_says(box):
    said = launched("if rank: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)")
    assert said[-2:] == [
        "54 lines of the launcher",
        f"brimful: process 1 of 2 (pid {pid_of(1)}) was killed by SIGSEGV; the other processes were ended",
    ]


def test_the_sentence_reaches_the_launchers_output_when_the_processes_write_elsewhere(box):
    said = launched("if rank: sys.exit(5)\ntime.sleep(60)", "--redirects")
    sentence = f"brimful: process 1 of 2 (pid {pid_of(1)}) left with exit code 5; the other processes were ended"
    assert said == ["54 lines of the launcher", sentence]


def test_processes_that_are_started_again_are_left_alone(box, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    said = launched(
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        " if rank: os.kill(os.getpid(), signal.SIGKILL)\n"
        " time.sleep(60)\n"
        "time.sleep(1.5)\nos.write(1, f'second set {rank}\\n'.encode())"
    )
    assert sorted(said)[1:] == ["second set 0", "second set 1"]
    assert min(said).endswith("; the launcher starts the processes again")
    assert folders(box) == []


def test_processes_without_their_launcher_are_ended(box):
    said = launched("if rank: os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)")
    assert "lost its launcher (pid " in said[-1]
    assert not any(supervise.alive(supervise.identity(pid_of(rank))) for rank in (0, 1))


@pytest.mark.parametrize(("number", "lines"), [(signal.SIGINT, 0), (signal.SIGTERM, 1)])
def test_a_signal_to_all_is_one_line_and_after_ctrl_c_none(box, number, lines):
    said, _ = plain(f"sys.excepthook = lambda *_: watch.fail(KeyboardInterrupt())\nos.kill(os.getpid(), {number:d})")
    assert len(said) == lines
    assert all(line.endswith("was ended by SIGTERM, and with it all others on this box") for line in said)


def test_a_pid_that_now_belongs_to_another_process_is_never_signalled(box):
    bystander = subprocess.Popen(["sleep", "60"])
    folder = box / "brimful-job"
    folder.mkdir()
    entry = {"rank": 0, "world_size": 2, "launcher": None, "again": False, "pid": bystander.pid, "started": "1"}
    (folder / "rank-0").write_text(json.dumps(entry) + "\n")
    said = run([sys.executable, "-m", "brimful.training.sidecar", str(folder)])
    assert f"process 0 of 2 (pid {bystander.pid}) is gone without a word" in said[-1]
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_process_that_is_not_registered_is_never_signalled(box):
    sibling = (
        "import subprocess as s; p = s.Popen(['sleep', '60'], stderr=s.DEVNULL); Path('pid').write_text(str(p.pid))"
    )
    plain(f"if rank == 0: {sibling}\nif rank: time.sleep(0.2); os._exit(1)\ntime.sleep(60)")
    pid = int(Path("pid").read_text())
    assert supervise.alive(supervise.identity(pid))
    os.kill(pid, signal.SIGKILL)


def test_who_ended_unseen_comes_before_those_whom_the_launcher_ended(box):
    sidecar = one_member(box)
    sidecar.members["rank-1"] = first = _Member(sidecar.members["rank-0"].entry | {"rank": 1})
    sidecar.members["rank-0"].gone_at, sidecar.members["rank-0"].status = 1.0, int(signal.SIGTERM)
    first.gone_at = 2.0
    assert sidecar.cause().startswith("process 1 of 1 (pid 1) is gone without a word")


def test_what_a_killed_sidecar_left_behind_is_no_obstacle(box, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(box))
    stale = supervise._folder(2)
    stale.mkdir()
    for name in ("sidecar", "rank-0", "rank-1"):
        (stale / name).write_text('{"pid": 1, "started": "never"}\n')
    said, codes = plain("")
    assert (said, codes, folders(box)) == ([], [0, 0], [])


def test_without_a_sidecar_training_goes_on_with_a_warning(box):
    Path("worker.py").write_text("import sys; sys.executable = '/bin/false'" + WATCH + "print('trained')")
    done = subprocess.run(
        [sys.executable, "worker.py"],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("trained\n", 0)
    assert "RuntimeWarning: process 0 is not supervised; if it dies, the others may wait for it: " in done.stderr


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (2, 2, " (nothing in the kernel's out-of-memory count)"),
        (2, 3, ": host memory ran out (the kernel's out-of-memory count went from 2 to 3)"),
        (None, None, " (the kernel's out-of-memory count cannot be read)"),
    ],
)
def test_the_kernels_out_of_memory_count_tells_why_a_process_was_killed(box, monkeypatch, before, after, words):
    counts = iter([before, after])
    monkeypatch.setattr(sidecar_module, "oom_kills", lambda: next(counts))
    sidecar = one_member(box)
    sidecar.members["rank-0"].gone_at, sidecar.members["rank-0"].status = 1.0, int(signal.SIGKILL)
    assert sidecar.cause() == f"process 0 of 1 (pid 1) was killed by SIGKILL{words}"


def test_supervision_imports_no_torch():
    code = "import sys, brimful.training.supervise, brimful.training.sidecar; print(sorted({'torch', 'numpy', 'psutil'} & set(sys.modules)))"
    assert run([sys.executable, "-c", code]) == ["[]"]


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"],
    ],
    ids=["torchrun", "accelerate"],
)
def test_a_death_amid_a_collective_ends_the_real_launcher_with_our_sentence(box, launcher):
    Path("worker.py").write_text(GLOO)
    said = run([sys.executable, "-m", *launcher, "worker.py"])
    assert said[-1].startswith("brimful: process 1 of 2 (pid ")
    assert said[-1].endswith("; the other processes were ended")
    assert len(said) > 20  # the launcher has had its say
