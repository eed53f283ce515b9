"""A plain PyTorch loop that survives out-of-memory. `python examples/integrations/plain_loop.py`

`# new` marks what Brimful adds, `# before:` what it replaces. A simulated memory limit stands for the GPU: it drops at step 4,
as if another process had taken the memory, and returns at step 8. Every step trains on its 64 rows, once.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import brimful  # new

VOCAB, PAD, STEPS = 128, 0, 16


def pad(rows):
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def loss(model, batch):
    logits, labels = model(batch[:, :-1]), batch[:, 1:]
    # before: return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")
    return brimful.Loss(sum=total, count=(labels != PAD).sum())  # new


def main():
    torch.manual_seed(0)
    starts, lengths = torch.randint(1, 64, (STEPS * 64,)), torch.randint(4, 48, (STEPS * 64,))
    rows = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    loader = DataLoader(rows, batch_size=64, collate_fn=list)  # before: collate_fn=pad
    model = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    stepper = brimful.Stepper(model, optimizer, loss, collate=pad, clip_norm=1.0, grow_after=3)  # new

    with brimful.simulated_memory("16MiB") as memory:  # stands for the GPU
        for step, batch in enumerate(loader, 1):
            memory.limit_bytes = (6 if 4 <= step < 8 else 16) * 2**20  # what others leave of it
            result = stepper.step(batch)
            # before: loss(model, batch).backward()
            #         nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            #         optimizer.step()
            #         optimizer.zero_grad()
            scheduler.step()
            print(
                f"step {result.step:2}: loss {result.loss:.3f}, {result.rows} rows in {result.micro_batches} micro-batches"
                + (f", {result.ooms} out-of-memory errors survived" if result.ooms else "")
            )
    for event in stepper.events:
        print(f"step {event.step}, {event.event}: {event.sentence}")
    print(f"{stepper.steps} of {STEPS} steps, {stepper.ooms} out-of-memory errors survived")


if __name__ == "__main__":
    main()
