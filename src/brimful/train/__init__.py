"""Training: the exact step, alone or over several processes, and what supervises it."""
