"""Python, packages, torch's build and a compiler: whether what is installed fits together, and fits the card.

torch's build is the most frequent mistake. Its CPU build trains on the CPU without a word although there is a card. A build for a
newer major version of CUDA than the driver supports sees no card either; a newer minor version works. A card whose compute
capability no kernel was compiled for fails at the first operation ("no kernel image is available").
"""

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from brimful.report.doctor.checks import Findings, Foreign, Sentence, say

_PYPI_CUDA = 13
"""torch from PyPI is built for this major version of CUDA (torch 2.11 and newer, Linux); for older drivers there is `OLDER_BUILD`."""
OLDER_BUILD = "--index-url https://download.pytorch.org/whl/cu126"
_NOT_FOR_USERS = {"dev"}
"""Extras that only those who work on Brimful need."""
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def python_checks(requires: str | None, version: str | None = None, prefix: str | None = None) -> Findings:
    """`requires` is the range in Brimful's own metadata; None if it is not installed as a package."""
    found, version = Findings("Software"), version or platform.python_version()
    if requires is not None and not _within(version, requires):
        text = say(
            "{version} is not among the versions that Brimful supports ({needed})", version=version, needed=requires
        )
        found.fail("Python", text, say("a new environment with Python {needed}", needed=requires), version=version)
    else:
        found.ok("Python", say("{version}, {folder}", version=version, folder=prefix or sys.prefix), version=version)
    return found


# ---- Packages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """One requirement of Brimful, and what is installed for it."""

    requirement: str
    """`transformers>=5.17`."""
    package: str
    extra: str | None
    """None if Brimful does not run without it."""
    installed: str | None
    enough: bool

    @property
    def phrase(self) -> Sentence:
        if self.installed is None:
            return say("{package} is missing", package=self.package)
        return say("{package} {version} is too old", package=self.package, version=self.installed)


def requirements() -> list[Needed] | None:
    """Brimful's requirements, by its own metadata; None if it is not installed as a package."""
    try:
        lines = metadata.requires("brimful") or []
    except metadata.PackageNotFoundError:
        return None
    return [needed for line in lines if (needed := _needed(line))]


def requires_python() -> str | None:
    try:
        return metadata.metadata("brimful")["Requires-Python"]
    except (metadata.PackageNotFoundError, KeyError):
        return None


def _needed(line: str) -> Needed | None:
    from packaging.requirements import Requirement

    one = Requirement(line)
    extra = found[1] if (found := _EXTRA.search(str(one.marker or ""))) else None
    if extra in _NOT_FOR_USERS:
        return None
    try:
        installed = metadata.version(one.name)
    except metadata.PackageNotFoundError:
        installed = None
    enough = installed is not None and one.specifier.contains(installed, prereleases=True)
    return Needed(
        requirement=f"{one.name}{one.specifier}", package=one.name, extra=extra, installed=installed, enough=enough
    )


def _within(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def package_checks(needed: Sequence[Needed] | None) -> Findings:
    """What Brimful requires, then its extras."""
    found = Findings("Software")
    if needed is None:
        found.skip("packages", say("Brimful is not installed as a package, so what it requires is unknown"))
        return found
    required = [one for one in needed if one.extra is None]
    if wrong := [one for one in required if not one.enough]:
        found.fail("packages", say("{wrong}", wrong=[one.phrase for one in wrong]), _pip(wrong))
    else:
        count = len(required)
        found.ok("packages", say("all {count} that Brimful requires are installed and new enough", count=count))
    extras = list(dict.fromkeys(one.extra for one in needed if one.extra))
    old = [one for one in needed if one.extra and one.installed and not one.enough]
    complete = [extra for extra in extras if all(one.enough for one in needed if one.extra == extra)]
    missing = [extra for extra in extras if extra not in complete]
    if old:
        found.warn("extras", say("{wrong}", wrong=[one.phrase for one in old]), _pip(old))
    elif extras and not missing:
        found.ok("extras", say("all are installed: {extras}", extras=", ".join(extras)))
    elif missing:
        command = f"pip install 'brimful[{','.join(missing)}]'"
        if complete:
            text = say("installed: {have}. For the others: `{command}`", have=", ".join(complete), command=command)
        else:
            text = say("none installed. For all: `{command}`", command=command)
        found.ok("extras", text, installed=complete, missing=missing)
    return found


def _pip(wrong: Sequence[Needed]) -> Sentence:
    names = " ".join(f"'{one.requirement}'" for one in wrong)
    return say("`{command}`", command=f"pip install {names}")


# ---- torch -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """What a child process found out about torch."""

    version: str
    cuda: str | None = None
    """The version of CUDA it was built for; None for other builds."""
    hip: str | None = None
    archs: tuple[str, ...] = ()
    """What its kernels were compiled for: `sm_90`, `compute_120`."""
    nccl: bool = False
    gloo: bool = True
    notes: tuple[str, ...] = ()
    import_s: float = 0.0

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> "Torch":
        names = ("version", "cuda", "hip", "nccl", "gloo", "import_s")
        plain = {name: answer[name] for name in names if name in answer}
        return cls(**plain, archs=tuple(answer.get("archs", ())), notes=tuple(answer.get("notes", ())))

    @property
    def build(self) -> Sentence:
        if self.cuda:
            return say("built for CUDA {version}", version=self.cuda)
        if self.hip:
            return say("built for ROCm {version}", version=self.hip)
        return say("a build without CUDA")


def torch_checks(
    torch: Torch | None, *, problem: str = "", nvidia_names: Sequence[str], driver_cuda: str | None, visible: int
) -> Findings:
    """The build against what NVML sees: `nvidia_names`, and the newest CUDA of the driver. `visible`: the cards torch sees."""
    found = Findings("Software")
    if torch is None:
        text = say("it cannot be imported ({problem})", problem=Foreign(problem))
        found.fail("torch", text, say("`{command}`", command="pip install --force-reinstall torch"))
        return found
    if nvidia_names and not torch.cuda and not visible:
        text = say(
            "{version} is a build without CUDA, but there is {card}", version=torch.version, card=nvidia_names[0]
        )
        found.fail("torch", text, install_torch(driver_cuda), version=torch.version)
    elif torch.cuda and driver_cuda and _major(torch.cuda) > _major(driver_cuda):
        text = say(
            "{version} is built for CUDA {build}, but the driver supports CUDA up to {driver}",
            version=torch.version, build=torch.cuda, driver=driver_cuda,
        )  # fmt: skip
        found.fail("torch", text, install_torch(driver_cuda), version=torch.version, driver_cuda=driver_cuda)
    else:
        text = say("{version}, {build}", version=torch.version, build=torch.build)
        found.ok("torch", text, version=torch.version, cuda=torch.cuda, import_s=torch.import_s)
    return found


def install_torch(driver_cuda: str | None) -> Sentence:
    """The command that installs a build this driver can run."""
    command = "pip install --force-reinstall torch"
    if driver_cuda is None or _major(driver_cuda) >= _PYPI_CUDA:
        return say("`{command}`", command=command)
    if _major(driver_cuda) == _PYPI_CUDA - 1:
        return say("`{command}`", command=f"{command} {OLDER_BUILD}")
    return say("update the NVIDIA driver; current builds of torch need one for CUDA 12 or newer")


def supports_card(archs: Sequence[str], capability: str) -> bool:
    """Whether a card of this compute capability can run kernels that were compiled for these.

    Binary code (`sm_86`) runs on the same major version from its minor version on, intermediate code (`compute_90`) is compiled
    by the driver for anything newer. An empty list is unknown, and passes.
    """
    major, minor = (int(part) for part in capability.split("."))
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = re.match(r"\d+", number)
        if digits is None:
            continue
        own = divmod(int(digits[0]), 10)
        exact_only = number != digits[0]  # sm_90a and sm_100f run on that very version
        if kind == "compute" and own <= (major, minor):
            return True
        if kind == "sm" and own[0] == major and (own[1] == minor if exact_only else own[1] <= minor):
            return True
    return not archs


def _major(version: str) -> int:
    return int(version.split(".")[0])


# ---- A compiler ------------------------------------------------------------------------------------------------------


def compiler_checks(
    *,
    on_cuda: bool,
    environment: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    include: Path | None = None,
    has_triton: Callable[[], bool] = lambda: util.find_spec("triton") is not None,
) -> Findings:
    """What `torch.compile` needs: on a CPU a C++ compiler, on CUDA Triton, a C compiler and Python's headers."""
    found = Findings("Software")
    name = environment.get("CC" if on_cuda else "CXX")
    candidates = [name] if name else ["gcc", "cc", "clang"] if on_cuda else ["g++", "clang++"]
    compiler = next((path for one in candidates if (path := which(one))), None)
    header = (include or Path(sysconfig.get_path("include"))) / "Python.h"
    if compiler is None:
        wanted = say("no C compiler ({names})" if on_cuda else "no C++ compiler ({names})", names=", ".join(candidates))
        text = say("{wanted}, so nothing can be compiled: `--compile on` fails", wanted=wanted)
        found.warn("compiler", text, say("`{command}`", command="apt install build-essential"))
    elif on_cuda and not has_triton():
        text = say("the package triton is missing, so nothing can be compiled: `--compile on` fails")
        found.warn("compiler", text, say("`{command}`", command="pip install triton"))
    elif on_cuda and not header.exists():
        text = say("{file} is missing, so Triton cannot compile: `--compile on` fails", file=str(header))
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        found.warn("compiler", text, say("`{command}`", command=f"apt install python{version}-dev"))
    else:
        found.ok("compiler", say("{path}", path=compiler))
    return found
