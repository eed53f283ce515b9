"""`brimful serve` as a user types it: its flags, and mistakes before the model is loaded."""

import socket
import subprocess
import sys

import pytest

from brimful.cli.serve import model_name
from tests.cli.test_cli import run
from tests.tasks.tiny import tiny_chat


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_chat(tmp_path_factory)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is reachable from other machines. Try: --token"),
        (["--port", "70000"], "--port 70000 must be between 0 and 65535"),
        (["--max-batch", "0"], "--max-batch 0 must be at least 1"),
        (["--max-wait", "0"], "--max-wait 0 must be positive"),
        (["--temperature", "-1"], "--temperature -1"),
        (["--max-body", "lots"], "--max-body: 'lots' is not a size"),
        (["--fill", "2"], "--fill 2"),
        (["--port", "0", "--context", "1"], "--context 1 must be at least 2"),
        (["--port", "0", "--device", "nothing"], "--device nothing"),
    ],
    ids=str,
)
def test_a_mistake_is_one_message_and_exit_code_2(tiny, capsys, flags, message):
    code, out, err = run("serve", str(tiny.model), *flags, capsys=capsys)
    assert (code, out) == (2, "") and message in err
    assert len([line for line in err.strip().splitlines() if not line.startswith("serve: ")]) == 1


def test_a_port_in_use_is_named_before_the_model_is_loaded(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, err = run("serve", "/no/such/model", "--port", str(port), capsys=capsys)
    assert code == 2 and f"--port {port} on 127.0.0.1 cannot be used" in err and f"Try: --port {port + 1}" in err


def test_a_missing_model_is_refused(capsys):
    code, _, err = run("serve", "/no/such/model", "--port", "0", "--device", "cpu", capsys=capsys)
    assert code == 2 and "there is no model at /no/such/model" in err


def test_without_the_extra_it_names_the_command_that_installs_it():
    program = "import sys; sys.modules['fastapi'] = None\nfrom brimful.cli import main\nmain(['serve', 'model'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Try: pip install 'brimful[serve]'." in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_help_needs_neither_torch_nor_fastapi():
    program = (
        "import sys\nfrom brimful.cli import main\ntry:\n    main(['serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'fastapi', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_the_name_is_that_of_the_run(tmp_path):
    checkpoint = tmp_path / "qwen" / "checkpoints" / "step-00000010" / "model"
    checkpoint.mkdir(parents=True)
    assert model_name(str(tmp_path / "qwen")) == "qwen"
    assert model_name(str(checkpoint)) == "step-00000010"
    assert model_name("owner/name") == "owner/name"


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("serve", "--help", capsys=capsys)
    flags = {word.strip("│ ,[];") for word in out.split() if word.startswith("--")}
    assert flags - {"--traceback", "--lang"} == {
        "--name", "--host", "--port", "--token", "--max-new-tokens", "--temperature", "--top-p", "--context", "--max-batch",
        "--max-queue", "--max-wait", "--max-body", "--grace", "--cuda-graphs", "--log-requests", "--device", "--memory-limit", "--fill", "--json",
    }  # fmt: skip
