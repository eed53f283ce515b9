"""Whether this process runs in a container, and by what sign; there is no one question that every runtime answers.

It matters for words only: in a container the processes that hold a GPU's memory are often outside and have no names,
and the remedy for a small /dev/shm is an option of `docker run`. No limit is derived from it.
"""

import os
from pathlib import Path

_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
"""Set by podman, LXC and systemd-nspawn; by Kubernetes; by Apptainer and its former self."""

_FILES = (".dockerenv", "run/.containerenv", "run/systemd/container")
"""Left by Docker, podman and systemd."""

_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")
"""Parts of the names that runtimes give their cgroups, where no cgroup namespace hides them."""


def container_sign(root: Path = Path("/")) -> str | None:
    """What gives the container away, as a phrase; None where nothing does."""
    for variable in _VARIABLES:
        if os.environ.get(variable):
            return f"${variable} is set"
    for file in _FILES:
        if (root / file).exists():
            return f"/{file} exists"
    try:
        groups = (root / "proc/self/cgroup").read_text()
    except OSError:
        return None
    return next((f"/proc/self/cgroup names {name}" for name in _GROUPS if name in groups), None)
