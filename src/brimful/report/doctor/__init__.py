"""`brimful doctor`: what on this machine would stop a training or slow it down, each with its fix, before one is started.

    examine.py           runs the checks, the slow ones beside each other
      ├── software.py    Python, packages, torch's build against the driver, a compiler; variables that do nothing or hurt
      ├── cards.py       NVML, every visible card, who holds it, all_reduce
      └── host_checks.py RAM, cores, swap, /dev/shm, limits; space, locks and speed of the run's folder and of the data
    trial.py             what runs in child processes, all that imports torch or touches a card, and who starts and ends them
    checks.py            `Check`: ok, warning, failed or not checked, in one sentence, with what to try; and how all look in a terminal

The process that the user starts never imports torch, and nothing is left behind: no process, no file, no CUDA context.
"""
