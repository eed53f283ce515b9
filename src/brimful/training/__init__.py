"""A training run: the one loop around the exact step, its folder, checkpoints, evaluation, and the processes it runs in."""
