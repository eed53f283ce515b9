"""From a task and a machine to the fastest configuration that fits.

options   what the user may fix, validated
target    the device, its limit, and who else is on it
prober    a model on that device, stepped and metered without a trace left behind
exact     whether the task's batches may be cut at all
levers    what can be switched on a model: gradient checkpointing
survey    small probes, the model of what they cost, and the largest micro-batch it leads to
speed     the fastest cut among the sizes that fit
trial     the levers tried one after the other, and the plan made of the better trial
reasons   every choice put into words
plan      the result: every choice with what was asked, what it became and why
cache     plans kept under a key of all that they depend on
fit       the whole of it
"""
