"""Ask what a training log died of, from Python. `python examples/diagnose_log.py [LOG]`

The log may come from any trainer. Without an argument, this takes the message of a card of 19.58 GiB, with the settings of its run.
"""

import sys
from pathlib import Path

import brimful

LOG = """
per_device_train_batch_size=32, gradient_accumulation_steps=2, num_processes=3, max_target_length=252, vocab_size=40960
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB of which 1.06 GiB
is free. Including non-PyTorch memory, this process has 18.50 GiB memory in use. Of the allocated memory 14.94 GiB is allocated by
PyTorch, and 3.18 GiB is reserved by PyTorch but unallocated.
"""


def main():
    diagnosis = brimful.diagnose(Path(sys.argv[1]) if len(sys.argv) > 1 else LOG)
    print(f"{diagnosis.kind} ({diagnosis.certainty})")
    print(diagnosis.cause)
    for fix in diagnosis.fixes[:3]:
        print(f"- {fix.title}: saves {fix.saves}, global batch {fix.global_batch}")
        print(f"  {fix.flags.get('transformers') or fix.flags.get('shell')}")


if __name__ == "__main__":
    main()
