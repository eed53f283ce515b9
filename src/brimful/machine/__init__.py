"""What this box is: its GPUs and who uses them, the RAM and cores this process may really have, space, software.

    Machine.detect()
      ├── gpu.py        each accelerator as torch numbers it     ◄── nvml.py      free memory and other processes
      │                                                              holders.py   the same in words, for errors
      ├── host.py       RAM, swap, cores as they are allowed     ◄── cgroup.py    what containers and jobs may use
      │                                                              limits.py    what `ulimit` allows
      ├── space.py      /dev/shm and the run folder's disk
      └── software.py   versions                                 ◄── container.py whether this is one, and the sign

Looking changes nothing: no CUDA context is made where NVML answers (one would cost about 0.5 GiB), and what cannot be
found out is None with a note that says why. Importing this package does not import torch; detecting does.
"""

from brimful.machine.gpu import Gpu, GpuProcess, describe_holders, gpu_holders
from brimful.machine.host import Host, Space
from brimful.machine.machine import Machine, Software

__all__ = ["Gpu", "GpuProcess", "Host", "Machine", "Software", "Space", "describe_holders", "gpu_holders"]
