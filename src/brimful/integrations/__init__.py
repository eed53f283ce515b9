"""The exact step inside other trainers: `exact(...)` in `transformers`, `lightning` and `accelerate`."""
