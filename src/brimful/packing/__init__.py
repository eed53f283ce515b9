"""Rows end to end in one sequence instead of padded side by side, for models that understand where a row ends.

    sequence.py        the rows of a micro-batch in one sequence, and where each begins
    attention.py       attention that stays inside each row, with T5's position bias and dropout of its weights
    triton_kernels.py  the same on a GPU, in Triton
    cross_entropy.py   the loss over a vocabulary, without all logits in memory at once
    causal_head.py     from hidden states to that loss
    pairs.py           log-probabilities of two replies to one prompt
    compiled.py        torch.compile for the blocks of a model
    t5.py              the forward pass of a T5 over packed rows
    causal.py          the same for Hugging Face's causal language models

A padded micro-batch of rows of 10 and 200 tokens computes on 400; packed, it computes on 210. Nothing else changes: packed
rows have the loss and the gradient that they have alone.
"""
