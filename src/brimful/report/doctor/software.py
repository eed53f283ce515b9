"""Python, packages, torch's build and a compiler: whether what is installed fits together, and fits the card.

torch's build is the most frequent mistake. Its CPU build trains on the CPU without a word although there is a card. A build for a
newer major version of CUDA than the driver supports sees no card either; a newer minor version works. A card whose compute
capability no kernel was compiled for fails at the first operation ("no kernel image is available").

Variables are looked at because nobody else does: `ACCELERATE_USE_GLOO=1` is in guides and scripts and exists in no library, a misspelt
`PYTORCH_CUDA_ALOC_CONF` is silent, and `CUDA_LAUNCH_BLOCKING=1`, set once to find a fault, makes every kernel wait for the one before.
Each rule looks at one value and answers with what is wrong and what to do, or with None.
"""

import difflib
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

from brimful.languages import Sentence, say
from brimful.report.doctor.checks import Findings, Status

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
        text = say("it cannot be imported ({problem})", problem=Sentence(problem))
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


Finding = tuple[Status, Sentence, Sentence] | None
_MISSPELT = 0.9
"""How alike two names are that differ by a letter or two, as difflib counts."""
_OWN = (
    "BRIMFUL_CACHE", "BRIMFUL_LANG", "BRIMFUL_TRACEBACK", "BRIMFUL_MINIMOL_PYTHON", "BRIMFUL_UNIMOL_PYTHON",
    "BRIMFUL_REQUEST", "BRIMFUL_REPORTS", "BRIMFUL_PARENT", "BRIMFUL_DOCTOR_PARENT", "BRIMFUL_DOCTOR_LIMIT",
)  # fmt: skip
_KNOWN = (
    *_OWN,
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "CUDA_HOME", "CUDA_PATH", "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO",
    "PYTORCH_ENABLE_MPS_FALLBACK", "TORCH_HOME", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL",
    "TORCH_SHOW_CPP_STACKTRACES", "TORCH_USE_CUDA_DSA", "TORCH_CUDA_ARCH_LIST", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCHINDUCTOR_CACHE_DIR", "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE", "TRITON_CACHE_DIR",
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS",
    "NCCL_NET", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE", "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_TOPO_FILE", "NCCL_TIMEOUT",
    "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT",
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE",
    "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_ENABLE_HF_TRANSFER", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE", "TRANSFORMERS_VERBOSITY",
    "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_GLOO", "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_LOG_LEVEL", "ACCELERATE_CPU_AFFINITY",
)  # fmt: skip
"""Names that are read by something: a name close to one of these, but not one of them, is misspelt."""
_ALLOCATOR_OPTIONS = {
    "expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold",
    "roundup_power2_divisions", "backend", "release_lock_on_cudamalloc", "pinned_use_cuda_host_register",
    "pinned_num_register_threads", "pinned_use_background_threads", "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "graph_capture_record_stream_reuse",
    "large_segment_size_mb", "per_process_memory_fraction", "throw_on_cudamalloc_oom",
}  # fmt: skip
_OFF = ("", "0", "false", "off", "no")
_LIBRARIES = ("libcudart.so", "libcublas.so", "libcudnn.so", "libnccl.so")


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrounding:
    """What a rule may depend on."""

    cores: int
    cards: int
    """That torch sees."""
    nvidia_cards: int
    """That NVML sees."""
    variables: Mapping[str, str]
    hub_cache: Path


Rule = Callable[[str, str, Surrounding], Finding]


def environment_checks(here: Surrounding) -> Findings:
    """One finding for each variable, or one line that says that there is none."""
    found = Findings("Environment")
    for name, value in sorted(here.variables.items()):
        rule = RULES.get(name)
        finding = rule(name, value, here) if rule else _misspelt(name, here)
        if finding is not None:
            status, text, fix = finding
            (found.fail if status == "failed" else found.warn)(name, text, fix, value=value)
    if not found:
        text = say("none that does nothing or slows trainings down, of {count} known ones", count=len(_KNOWN))
        found.ok("variables", text)
    return found


# ---- What does nothing -----------------------------------------------------------------------------------------------


def _misspelt(name: str, here: Surrounding) -> Finding:
    if name in _KNOWN:
        return None
    close = [one for one in difflib.get_close_matches(name, _KNOWN, n=1, cutoff=_MISSPELT) if _typo(name, one)]
    if close:
        text = say("does nothing: no library reads this name")
        return "warning", text, say("{name}, if that is what you meant", name=close[0])
    if name.startswith("BRIMFUL_"):
        return "warning", say("does nothing: Brimful does not read it"), _unset(name)
    return None


def _typo(name: str, known: str) -> bool:
    """At most two letters apart. Real names that close to each other are all in `_KNOWN`."""
    parts = difflib.SequenceMatcher(None, name, known, autojunk=False).get_opcodes()
    changed = sum(max(b - a, d - c) for kind, a, b, c, d in parts if kind != "equal")
    return changed <= 2


def _nothing(text: Sentence, instead: Sentence) -> Rule:
    def rule(name: str, value: str, here: Surrounding) -> Finding:
        return "warning", text, say("`unset {name}`; {instead}", name=name, instead=instead)

    return rule


def _renamed(new: str) -> Rule:
    def rule(name: str, value: str, here: Surrounding) -> Finding:
        return "warning", say("an old name, which new versions do not read"), say("use {new} instead", new=new)

    return rule


# ---- What hurts ------------------------------------------------------------------------------------------------------


def _hurts(effect: Sentence) -> Rule:
    def rule(name: str, value: str, here: Surrounding) -> Finding:
        return None if value.strip().lower() in _OFF else ("warning", effect, _unset(name))

    return rule


def _left_over(effect: Sentence) -> Rule:
    """A workaround that costs speed; only with several cards."""

    def rule(name: str, value: str, here: Surrounding) -> Finding:
        if value.strip() in ("", "0") or here.cards < 2:
            return None
        fix = say("`unset {name}`, then `brimful doctor` tells whether it is still needed", name=name)
        return "warning", effect, fix

    return rule


def _unset(name: str) -> Sentence:
    return say("`unset {name}`", name=name)


def _threads(name: str, value: str, here: Surrounding) -> Finding:
    fix = say("`export {name}={cores}`", name=name, cores=here.cores)
    if not value.strip().isdigit() or int(value) < 1:
        return "warning", say("{value} is not a number of threads", value=value or say("(empty)")), fix
    if int(value) == 1 and here.cores >= 4:
        return "warning", say("1 thread, although there are {cores} cores", cores=here.cores), fix
    if int(value) > here.cores:
        return "warning", say("{value} threads wait for {cores} cores", value=value, cores=here.cores), fix
    return None


def _visible_devices(name: str, value: str, here: Surrounding) -> Finding:
    if not here.nvidia_cards:
        return None
    fix = _unset(name)
    if value.strip() in ("", "-1", "none", "NoDevFiles"):
        text = say("{value} hides every card, so trainings run on the CPU", value=f"'{value}'")
        return "failed", text, fix
    numbers = [part.strip() for part in value.split(",")]
    beyond = [part for part in numbers if part.isdigit() and int(part) >= here.nvidia_cards]
    if beyond:
        text = say("there is no card {number}; CUDA drops it and all that come after it", number=beyond[0])
        return "warning", text, say("numbers from 0 to {last}", last=here.nvidia_cards - 1)
    return None


def _allocator(name: str, value: str, here: Surrounding) -> Finding:
    options = {part.partition(":")[0]: part.partition(":")[2] for part in _split_options(value)}
    unknown = [option for option in options if option not in _ALLOCATOR_OPTIONS]
    if unknown:
        text = say("has the unknown option {option}, with which torch does not start on CUDA", option=unknown[0])
        close = difflib.get_close_matches(unknown[0], _ALLOCATOR_OPTIONS, n=1)
        return "failed", text, say("{option}", option=close[0]) if close else _unset(name)
    if options.get("expandable_segments", "").lower() != "true" and "backend" not in options:
        text = say("keeps Brimful from using expandable segments, so memory fragments")
        return "warning", text, say("`unset {name}`, or add {option}", name=name, option="expandable_segments:True")
    return None


def _split_options(value: str) -> list[str]:
    """At commas, except those within brackets: `roundup_power2_divisions:[256:1,512:2]`."""
    parts, depth = [""], 0
    for letter in value:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _offline(name: str, value: str, here: Surrounding) -> Finding:
    if value.strip().lower() not in ("1", "true", "yes", "on") or any(here.hub_cache.glob("*--*")):
        return None
    text = say(
        "nothing is downloaded, and {folder} is empty: names on the hub cannot be found", folder=str(here.hub_cache)
    )
    return "warning", text, say("`unset {name}`, or `hf download` where there is a network", name=name)


def _launcher(name: str, value: str, here: Surrounding) -> Finding:
    """Without a launcher, `brimful train` would wait for ranks that nobody starts."""
    if "TORCHELASTIC_RUN_ID" in here.variables or value.strip() in ("", "0", "1"):
        return None
    text = say("{value}, although no launcher runs: a training would wait for the other processes", value=value)
    status: Status = "failed" if "RANK" in here.variables else "warning"
    return status, text, say("`unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE`")


def _library_path(name: str, value: str, here: Surrounding) -> Finding:
    """torch carries its own CUDA libraries; those found here are loaded instead."""
    for folder in value.split(":"):
        for library in _LIBRARIES if folder else ():
            if next(Path(folder).glob(f"{library}*"), None):
                text = say(
                    "{folder} has {library}, which is loaded instead of torch's own", folder=folder, library=library
                )
                return "warning", text, say("remove it from {name}", name=name)
    return None


def _debug_level(*levels: str, effect: Sentence) -> Rule:
    def rule(name: str, value: str, here: Surrounding) -> Finding:
        return ("warning", effect, _unset(name)) if value.strip().upper() in levels else None

    return rule


def _tf32(name: str, value: str, here: Surrounding) -> Finding:
    return ("warning", say("TF32 is switched off, so fp32 is slower"), _unset(name)) if value.strip() == "0" else None


def _parallel_tokenizers(name: str, value: str, here: Surrounding) -> Finding:
    if value.strip().lower() in ("false", "0", "no", "off") and here.cores >= 2:
        return "warning", say("tokenizing uses one core of {cores}", cores=here.cores), _unset(name)
    return None


def _eager_loading(name: str, value: str, here: Surrounding) -> Finding:
    if value.strip().upper() == "EAGER":
        return "warning", say("every kernel is loaded at the start, which takes memory on each card"), _unset(name)
    return None


RULES: Mapping[str, Rule] = {
    "ACCELERATE_USE_GLOO": _nothing(say("does nothing: no library reads this name"), say("`--backend gloo` does what it promises")),
    "NCCL_TIMEOUT": _nothing(say("does nothing: neither NCCL nor torch reads it"), say("an error on one card does not make the others hang")),
    "TORCH_USE_CUDA_DSA": _nothing(say("does nothing: it only counts when torch itself is compiled"), say("CUDA_LAUNCH_BLOCKING=1 finds faults")),
    "TRANSFORMERS_CACHE": _renamed("HF_HOME"),
    "HF_HUB_ENABLE_HF_TRANSFER": _renamed("HF_XET_HIGH_PERFORMANCE=1"),
    "NCCL_BLOCKING_WAIT": _renamed("TORCH_NCCL_BLOCKING_WAIT"),
    "NCCL_ASYNC_ERROR_HANDLING": _renamed("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "CUDA_LAUNCH_BLOCKING": _hurts(say("every kernel waits for the one before it, so trainings are slow")),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _hurts(say("every tensor is allocated by the driver, which is slow; memory cannot be planned")),
    "TORCH_NCCL_BLOCKING_WAIT": _hurts(say("the process waits in every collective, so trainings are slow")),
    "TORCHDYNAMO_DISABLE": _hurts(say("nothing is compiled, so `--compile on` has no effect")),
    "TORCH_COMPILE_DISABLE": _hurts(say("nothing is compiled, so `--compile on` has no effect")),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": _hurts(say("every start compiles everything again")),
    "CUDA_CACHE_DISABLE": _hurts(say("the driver compiles its kernels again at every start")),
    "CUDA_MODULE_LOADING": _eager_loading,
    "NVIDIA_TF32_OVERRIDE": _tf32,
    "NCCL_P2P_DISABLE": _left_over(say("cards do not copy to each other directly, which is slow")),
    "NCCL_SHM_DISABLE": _left_over(say("cards do not exchange through shared memory, which is slow")),
    "NCCL_IB_DISABLE": _left_over(say("InfiniBand is not used between machines")),
    "NCCL_DEBUG": _debug_level("INFO", "TRACE", "ABORT", effect=say("NCCL prints hundreds of lines")),
    "TORCH_DISTRIBUTED_DEBUG": _debug_level("DETAIL", effect=say("every collective is checked by another one, which is slow")),
    "OMP_NUM_THREADS": _threads,
    "MKL_NUM_THREADS": _threads,
    "TOKENIZERS_PARALLELISM": _parallel_tokenizers,
    "CUDA_VISIBLE_DEVICES": _visible_devices,
    "PYTORCH_CUDA_ALLOC_CONF": _allocator,
    "PYTORCH_ALLOC_CONF": _allocator,
    "HF_HUB_OFFLINE": _offline,
    "TRANSFORMERS_OFFLINE": _offline,
    "WORLD_SIZE": _launcher,
    "LD_LIBRARY_PATH": _library_path,
}  # fmt: skip


def hub_cache(variables: Mapping[str, str] = os.environ) -> Path:
    """Where models of the hub are kept, by the same variables as huggingface_hub."""
    home = Path(variables.get("HF_HOME") or Path(variables.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(variables.get("HF_HUB_CACHE") or home / "hub").expanduser()
