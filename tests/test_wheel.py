"""The wheel: built, put into a folder of its own, and used from there."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=300)
    return next(folder.glob("brimful-*.whl"))


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("brimful/")}
        others = {name.split("/")[0] for name in archive.namelist()} - {"brimful"}
    source = ROOT / "src"
    tracked = {str(path.relative_to(source)) for path in (source / "brimful").rglob("*") if path.is_file()}
    assert inside == {name for name in tracked if "__pycache__" not in name}
    assert len(others) == 1 and next(iter(others)).endswith(".dist-info")


def test_a_command_runs_from_the_wheel_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import brimful; print(brimful.__file__); from brimful.cli import main; main(['machine', '--json'])"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    place, *rest = done.stdout.splitlines()
    assert place.startswith(str(tmp_path)) and "host" in json.loads("\n".join(rest))


@pytest.mark.torture
def test_the_demo_runs_from_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env/bin/python")
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"{wheel}[eval]"]
    subprocess.run(install, check=True, timeout=1200)
    done = subprocess.run(
        [str(tmp_path / "env/bin/brimful"), "demo", "--run", "demo"],
        cwd=tmp_path, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0 and "3 of 3" in done.stdout, done.stderr
