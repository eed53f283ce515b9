"""One exact optimizer step, whatever memory does.

stepper.py           `Stepper`: one call, one optimizer step
gradients.py         the gradients of a step over micro-batches and ranks
recovery.py          out of memory: from the error to the retry, and back to the old size
optimizer_memory.py  the bytes of the optimizer's step, reserved before it begins
distributed.py       several ranks: agreements, one reduce, who takes which rows
checks.py            models, optimizers and losses that cannot be split or repeated
rows.py              the rows of a step as batches
result.py            `StepResult` and events
"""
