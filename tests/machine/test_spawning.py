"""Processes are started unasked only where a second import of the main file does no harm."""

import sys
from types import ModuleType

import pytest

from brimful.machine.host import may_spawn


@pytest.mark.parametrize(("file", "allowed"), [("/somewhere/bin/brimful", True), ("train.py", False), (None, False)])
def test_a_script_of_the_user_is_not_imported_again(file, allowed, monkeypatch):
    main = ModuleType("__main__")
    main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert may_spawn() is allowed


def test_a_module_that_python_runs_may_be(monkeypatch):
    main = ModuleType("__main__")
    main.__spec__ = object()
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert may_spawn()
