"""What a training step takes on a GPU that is not here.

estimator      `estimate`: from a task and a card to the micro-batch that fits
cards          the GPUs that are known, and their memory
accuracy       how far predictions were from measurements, and what was never compared
step_memory    the memory of a step at one setting, for any number of rows
trace          the allocations of one step, run on fake tensors
fake_cuda      CUDA tensors without CUDA
fake_kernels   what attention and loss allocate on a card
kernel_memory  what other kernels hold beside their results
"""
