"""An Accelerate loop that survives out-of-memory. `python examples/integrations/accelerate_loop.py`

`# new` marks what Brimful adds, `# before:` what it replaces. A simulated memory limit stands for the GPU: it drops at step 4,
as if another process had taken the memory, and returns at step 8.

On two processes: `torchrun --nproc_per_node 2 examples/integrations/accelerate_loop.py`
"""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import brimful  # new
from brimful.integrations.accelerate import exact  # new

VOCAB, PAD, ROWS = 128, 0, 1024


def pad(rows):
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def loss(model, batch):
    logits, labels = model(batch[:, :-1]), batch[:, 1:]
    # before: return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")
    return brimful.Loss(sum=total, count=(labels != PAD).sum())  # new


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    starts, lengths = torch.randint(1, 64, (ROWS,)), torch.randint(4, 48, (ROWS,))
    rows = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    loader = DataLoader(rows, batch_size=64, collate_fn=pad)
    model = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    stepper = exact(accelerator, model, optimizer, loss, clip_norm=1.0, grow_after=3)  # new

    with brimful.simulated_memory("16MiB") as memory:  # stands for the GPU
        for step, batch in enumerate(loader, 1):
            memory.limit_bytes = (6 if 4 <= step < 8 else 16) * 2**20  # what others leave of it
            result = stepper.step(batch)
            # before: accelerator.backward(loss(model, batch))
            #         accelerator.clip_grad_norm_(model.parameters(), 1.0)
            #         optimizer.step()
            #         optimizer.zero_grad()
            scheduler.step()
            accelerator.log({"loss": result.loss, "lr": scheduler.get_last_lr()[0]}, step=result.step)
            accelerator.print(
                f"step {result.step:2}: loss {result.loss:.3f}, {result.rows} rows, here in {result.micro_batches} "
                f"micro-batches" + (f", {result.ooms} out-of-memory errors survived" if result.ooms else "")
            )
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)  # the stepper's state is in it
    for event in stepper.events:
        accelerator.print(f"step {event.step}, {event.event}: {event.sentence}")
    accelerator.print(f"{stepper.steps} of {len(loader)} steps, {stepper.ooms} out-of-memory errors survived")
    accelerator.end_training()


if __name__ == "__main__":
    main()
