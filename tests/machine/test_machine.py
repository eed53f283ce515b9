"""Space, containers, and the whole snapshot."""

import json
import subprocess
import sys
import time

import pytest
import torch

import brimful
from brimful.machine.host import Space, container_sign
from brimful.machine.machine import Machine, Software
from brimful.units import GiB


@pytest.fixture
def no_container_variables(monkeypatch):
    for name in ("container", "KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        monkeypatch.delenv(name, raising=False)


def test_the_disk_of_a_folder_yet_to_be_made_is_its_parents(tmp_path):
    space = Space.around(tmp_path / "runs" / "first")
    assert space is not None and space.path == str(tmp_path)


def test_a_path_that_does_not_exist_has_no_space(tmp_path):
    assert Space.of(tmp_path / "nowhere") is None


def test_free_space_is_part_of_the_total(tmp_path):
    space = Space.of(tmp_path)
    assert space is not None and 0 <= space.free_bytes < space.total_bytes


@pytest.mark.parametrize("file", [".dockerenv", "run/.containerenv", "run/systemd/container"])
def test_a_runtimes_file_gives_the_container_away(lay, file, no_container_variables):
    assert container_sign(lay({file: ""})) == f"/{file} exists"


def test_a_kubernetes_pod_is_known_by_its_variable(tmp_path, monkeypatch, no_container_variables):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert container_sign(tmp_path) == "$KUBERNETES_SERVICE_HOST is set"


def test_the_name_of_a_cgroup_gives_the_container_away(lay, no_container_variables):
    assert container_sign(lay({"proc/self/cgroup": "4:memory:/docker/4f2\n"})) == "/proc/self/cgroup names docker"


def test_a_plain_machine_is_no_container(lay, no_container_variables):
    assert container_sign(lay({"proc/self/cgroup": "0::/user.slice/session-1.scope\n"})) is None


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


def test_looking_takes_well_under_a_third_of_a_second():
    Machine.detect()
    began = time.perf_counter()
    Machine.detect()
    assert time.perf_counter() - began < 0.3


def test_importing_the_package_does_not_import_torch():
    code = "import sys, brimful.machine; sys.exit('torch' in sys.modules or 'pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
