"""What a training step costs in bytes: counted, measured, modelled, and met when it runs out.

ledger    counts the live tensor storages of any torch program; gives the CPU a virtual limit
bare      one optimizer step of one or two micro-batches, with its phases marked
meter     the peak of each phase of a bare step, from the device's allocator or from the ledger
model     peak bytes as a function of rows and lengths, fitted to such readings
cut       partitions the rows of a step so that each micro-batch fits, and deals rows to processes
heap      gives freed host memory back to the system
oom       recognises every kind of out-of-memory and cleans up after it
snapshot  weights, buffers, optimizer state and random state, put back bit for bit
"""
