"""What this machine has: its GPUs and who uses them, the RAM and cores this process may use, space, software.

    Machine.detect()      machine.py    the whole snapshot, with the versions of the software
      ├── gpu.py                        each accelerator as torch numbers it, free memory, other processes
      └── host.py                       RAM, swap and cores as they are allowed, space on disks, memory of processes
            └── cgroup.py               limits by containers, batch systems and `ulimit`
    GpuMeter, HostMeter   usage.py      what GPU and host do now, every few seconds while a run trains

Detecting changes nothing: no CUDA context is created if NVML answers (one would cost about 0.5 GiB), and what is unknown
is None, with a note that says why. Importing this package does not import torch; detecting does.
"""
