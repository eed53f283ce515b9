"""The whole snapshot."""

import json
import subprocess
import sys

import torch

import brimful
from brimful.machine.machine import Machine, Software
from brimful.units import GiB


def test_software_says_how_the_container_was_recognised(lay, no_container_variables):
    software = Software.detect(root=lay({".dockerenv": ""}))
    assert (software.in_container, software.container_sign) == (True, "/.dockerenv exists")


def test_software_names_torchs_build():
    assert Software.detect().torch == torch.__version__


def test_machine_is_a_public_name():
    assert brimful.Machine is Machine


def test_detect_looks_at_the_run_folders_disk(tmp_path):
    disk = Machine.detect(tmp_path / "run").disk
    assert disk is not None and disk.path == str(tmp_path)


def test_to_json_survives_json_unchanged(nvml, torch_sees):
    nvml.add("GPU-u", used=21 * GiB, processes={4_000_111: 20 * GiB})
    torch_sees("u")
    plain = Machine.detect().to_json()
    assert json.loads(json.dumps(plain)) == plain


def test_to_json_gives_sizes_in_bytes(nvml, torch_sees):
    nvml.add("GPU-u", used=21 * GiB, processes={4_000_111: 20 * GiB})
    torch_sees("u")
    (gpu,) = Machine.detect().to_json()["gpus"]
    assert gpu["other_processes"] == [{"pid": 4_000_111, "name": None, "used_bytes": 20 * GiB}]
    assert gpu["used_by_others_bytes"] == 20 * GiB


def test_importing_the_package_does_not_import_torch():
    code = "import sys, brimful.machine; sys.exit('torch' in sys.modules or 'pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
