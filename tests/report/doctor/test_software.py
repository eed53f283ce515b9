"""Python, packages, torch's build against driver and card, and a compiler."""

import pytest

from brimful.report.doctor.software import (
    Needed,
    Torch,
    compiler_checks,
    install_torch,
    package_checks,
    python_checks,
    requirements,
    requires_python,
    supports_card,
    torch_checks,
)
from tests.report.doctor.fake_machine import CPU, CUDA, only


def needed(package="rich", installed="15.0", enough=True, extra=None):
    return Needed(requirement=f"{package}>=14", package=package, extra=extra, installed=installed, enough=enough)


def test_a_supported_python_is_ok():
    assert only(python_checks(">=3.11", "3.12.4")).status == "ok"


def test_an_older_python_fails_with_the_range():
    check = only(python_checks(">=3.11", "3.10.1"))
    assert check.status == "failed" and ">=3.11" in str(check.fix)


def test_a_python_is_not_judged_without_metadata():
    assert only(python_checks(None, "3.10.1")).status == "ok"


def test_brimfuls_own_requirements_are_read_and_met_here():
    found = requirements()
    assert found is not None and {"torch", "rich", "cyclopts"} <= {one.package for one in found if one.extra is None}
    assert all(one.enough for one in found if one.extra is None)
    assert requires_python() == ">=3.11"


def test_tools_of_those_who_work_on_brimful_are_no_extra_for_users():
    assert "dev" not in {one.extra for one in requirements() or ()}


def test_complete_packages_are_ok():
    assert only(package_checks([needed()]), "packages").status == "ok"


def test_old_and_missing_packages_fail_with_one_pip_command():
    check = only(package_checks([needed(enough=False), needed("psutil", None, False)]), "packages")
    assert check.status == "failed"
    assert str(check.text) == "rich 15.0 is too old, psutil is missing"
    assert str(check.fix) == "`pip install 'rich>=14' 'psutil>=14'`"


def test_a_missing_extra_is_no_warning_but_has_its_command():
    check = only(package_checks([needed(), needed("rdkit", None, False, "mol")]), "extras")
    assert check.status == "ok" and "pip install 'brimful[mol]'" in str(check.text)


def test_an_extra_that_is_too_old_is_a_warning():
    check = only(package_checks([needed("peft", "0.1", False, "lora")]), "extras")
    assert check.status == "warning" and str(check.fix) == "`pip install 'peft>=14'`"


def test_without_metadata_packages_are_not_checked():
    assert only(package_checks(None)).status == "not checked"


def torch_check(torch, cards=(), driver=None, visible=0, problem=""):
    return only(torch_checks(torch, problem=problem, nvidia_names=cards, driver_cuda=driver, visible=visible))


def test_a_cpu_build_without_a_card_is_ok():
    assert torch_check(CPU).status == "ok"


def test_a_cpu_build_beside_a_card_fails_with_the_build_for_the_driver():
    check = torch_check(CPU, ("NVIDIA H200",), "12.4")
    assert check.status == "failed" and "NVIDIA H200" in str(check.text) and "whl/cu126" in str(check.fix)


def test_a_build_for_a_newer_major_cuda_than_the_driver_fails():
    check = torch_check(CUDA, ("NVIDIA H200",), "12.4")
    assert check.status == "failed"
    assert "CUDA 13.0" in str(check.text) and "CUDA up to 12.4" in str(check.text)


def test_a_build_for_a_newer_minor_cuda_is_ok():
    assert torch_check(Torch(version="2.11", cuda="12.8"), ("NVIDIA H200",), "12.4", 1).status == "ok"


def test_a_torch_that_cannot_be_imported_fails_with_the_reason():
    check = torch_check(None, problem="ImportError: libcudnn.so.9")
    assert check.status == "failed" and "libcudnn" in str(check.text)


@pytest.mark.parametrize(
    ("driver", "words"), [("13.1", "torch`"), ("12.2", "cu126"), ("11.8", "update the NVIDIA driver")]
)
def test_the_build_to_install_follows_the_driver(driver, words):
    assert words in str(install_torch(driver))


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["sm_80", "sm_90"], "8.6", True),
        (["sm_86"], "8.0", False),
        (["sm_80", "sm_90"], "7.5", False),
        (["sm_80", "compute_90"], "12.0", True),
        (["sm_90a"], "9.0", True),
        (["sm_100a"], "10.3", False),
        (["sm_100f", "sm_120"], "12.1", True),
        ([], "7.5", True),
    ],
)
def test_which_kernels_a_card_runs(archs, capability, runs):
    assert supports_card(archs, capability) is runs


def compiler(tmp_path, *, on_cuda, programs=(), headers=True, triton=True, environment=None):
    if headers:
        (tmp_path / "Python.h").touch()
    return only(
        compiler_checks(
            on_cuda=on_cuda,
            environment=environment or {},
            which=lambda name: f"/usr/bin/{name}" if name in programs else None,
            include=tmp_path,
            has_triton=lambda: triton,
        )
    )


def test_a_cpu_needs_only_a_cxx_compiler(tmp_path):
    assert compiler(tmp_path, on_cuda=False, programs=("g++",), headers=False, triton=False).status == "ok"


def test_a_missing_compiler_is_a_warning(tmp_path):
    check = compiler(tmp_path, on_cuda=False, programs=("gcc",))
    assert check.status == "warning" and "build-essential" in str(check.fix)


def test_cuda_with_compiler_headers_and_triton_is_ok(tmp_path):
    assert compiler(tmp_path, on_cuda=True, programs=("gcc",)).status == "ok"


def test_missing_headers_are_a_warning_on_cuda(tmp_path):
    check = compiler(tmp_path, on_cuda=True, programs=("gcc",), headers=False)
    assert check.status == "warning" and "Python.h" in str(check.text) and "-dev" in str(check.fix)


def test_a_missing_triton_is_a_warning_on_cuda(tmp_path):
    assert "triton" in str(compiler(tmp_path, on_cuda=True, programs=("gcc",), triton=False).fix)


def test_the_compiler_of_the_environment_counts(tmp_path):
    check = compiler(tmp_path, on_cuda=True, programs=("gcc",), environment={"CC": "icc"})
    assert check.status == "warning" and "icc" in str(check.text)
