"""A plain training loop on a small card. After step 3 another process takes half of it."""

import torch
from setting import STEPS, card, loss, make, someone_takes_memory

model, optimizer, batches = make()
with card():
    for step, batch in enumerate(batches[:STEPS], start=1):
        if step == 4:
            someone_takes_memory()
        optimizer.zero_grad()
        total, count = loss(model, batch)
        (total / count).backward()
        optimizer.step()
        print(f"step {step:2}  loss {total.item() / count:.4f}", flush=True)

torch.save(model.state_dict(), "plain.pt")
