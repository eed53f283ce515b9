"""The same loop with Brimful's step."""

from setting import STEPS, card, loss, make, someone_takes_memory

import brimful


def report(event):
    if event.event == "oom":
        print(event.sentence, flush=True)


model, optimizer, batches = make()
stepper = brimful.Stepper(model, optimizer, lambda model, batch: brimful.Loss(*loss(model, batch)), on_event=report)
with card():
    for step, batch in enumerate(batches[:STEPS], start=1):
        if step == 4:
            someone_takes_memory()
        result = stepper.step(batch)
        split = f"{result.rows} rows in {result.micro_batches} micro-batch{'es' if result.micro_batches > 1 else ''}"
        print(f"step {step:2}  loss {result.loss:.4f}  {split}", flush=True)

undisturbed, optimizer, batches = make()
for batch in batches[:STEPS]:
    optimizer.zero_grad()
    total, count = loss(undisturbed, batch)
    (total / count).backward()
    optimizer.step()
pairs = zip(model.parameters(), undisturbed.parameters(), strict=True)
distance = max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)
print(f"weights against a run with all its memory: {distance:.0e} apart", flush=True)
