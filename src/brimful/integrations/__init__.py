"""The exact step inside other trainers: `exact(...)` in `transformers`, `lightning` and `accelerate`.

loss_records  what a Trainer's `compute_loss` writes on its trainer besides the loss
trl_losses    what the losses of TRL's trainers take from all rows of a batch
"""
