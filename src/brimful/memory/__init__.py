"""The memory of a training step: counted, measured, predicted, and what happens when it runs out.

context   one optimizer step, with its phases marked
ledger    counts the live tensor storages of any torch program, and limits them on the CPU
meter     the peak of each phase, from the device's allocator or from the ledger; what is available
model     peak bytes as a function of rows and lengths, fitted to such readings
history   every allocation of a step as such a function; temporaries has those of kernels
allocator what torch's caching allocator reserves for them
split     divides the rows of a step so that each micro-batch fits, and deals rows to ranks
layout    rows padded side by side or packed end to end
graphs    the launches of a micro-batch, recorded once and replayed
oom       recognises out-of-memory errors and cleans up after them
forward   evaluation and generation in batches that fit
snapshot  weights, buffers, optimizer state and random state, restored bit for bit
"""
