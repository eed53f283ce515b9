"""What a user may import, what each name shows as its example, and that importing costs no torch."""

import doctest
import importlib
import subprocess
import sys

import pytest

import brimful

PUBLIC = [
    "BrimfulError",
    "Hook",
    "Loader",
    "Loss",
    "Machine",
    "Plan",
    "StepResult",
    "Stepper",
    "Task",
    "diagnose",
    "estimate",
    "plan",
    "simulated_memory",
    "train",
]


def test_the_public_names_are_these_and_no_others():
    names: dict[str, object] = {}
    exec("from brimful import *", names)
    assert sorted(set(names) - {"__builtins__"}) == brimful.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_listed_and_named_so(name):
    assert getattr(brimful, name).__name__ == name and name in dir(brimful)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_shows_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = getattr(brimful, name)
    module = importlib.import_module(value.__module__)
    (example,) = [test for test in doctest.DocTestFinder(recurse=False).find(value, name, module) if test.examples]
    failures, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example)
    assert failures == 0


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="^module 'brimful' has no attribute 'trian'$"):
        _ = brimful.trian


@pytest.mark.parametrize(
    "code",
    [
        "import brimful, brimful.cli, brimful.tasks.load; from brimful import Task, Loss, Machine",
        "from brimful.cli import main; main(['--help'])",
        "from brimful.cli import main; main(['plan', '--help'])",
    ],
)
def test_torch_is_not_imported_by(code):
    program = f"import sys\n{code}\nprint('heavy:', sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
