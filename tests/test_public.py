"""What a user may import, and that importing it costs no torch."""

import subprocess
import sys

import pytest

import brimful

PUBLIC = ["Loss", "Machine", "Plan", "Stepper", "Task", "plan", "simulated_memory", "train"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_the_public_names_are_these_and_no_others():
    assert brimful.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_is_called_so(name):
    assert getattr(brimful, name).__name__.removeprefix("brimful.") == name  # `train` is the package and the function


def test_a_star_import_brings_the_public_names_and_no_others():
    names: dict[str, object] = {}
    exec("from brimful import *", names)
    assert sorted(set(names) - {"__builtins__"}) == PUBLIC


def test_the_public_names_are_listed():
    assert set(PUBLIC) <= set(dir(brimful))


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="^module 'brimful' has no attribute 'trian'$"):
        _ = brimful.trian


@pytest.mark.parametrize(
    "code",
    [
        "import brimful",
        "import brimful.cli",
        "import brimful.tasks.load",
        "from brimful import Task, Loss, Machine",
        "from brimful.cli import main; main(['--help'])",
        "from brimful.cli import main; main(['plan', '--help'])",
    ],
)
def test_torch_is_not_imported_by(code):
    heavy = run(f"import sys\n{code}\nprint('heavy:', sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))")
    assert heavy.splitlines()[-1] == "heavy: []"
