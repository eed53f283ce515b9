"""From a task and a machine to the fastest configuration that fits.

plan_options   what the user may set
target         the device, its memory limit, and where that limit is enforced
planner        `plan`: the whole of it, and the saved plans
plan_time      the clock, and how long planning may take
probe          a step of any size, run and metered
exactness      whether splitting a step changes its result
levers         gradient checkpointing, compiled blocks and other switches of a model
survey         small probes, the memory model, and the largest micro-batch that fits
micro_batch    the search: layout, levers and the size of a micro-batch are decided here
speed          the fastest split among the sizes that fit
compile_trial  whether blocks are compiled
graph_trial    whether its micro-batches are replayed as a CUDA graph
choices        every choice of the search with its reason
host_memory    loader workers, prefetch, pinned memory and the host RAM they take
plan           the result: every choice with its reason
"""
