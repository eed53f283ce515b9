"""Many runs trained in one step: the one exception to "there is one training loop", since a pack is many runs in one step.

job       what one run is; nothing of it depends on what else is trained
chance    everything random, as a function of seed and step
shelf     features on the device once, for all runs that read them
order     which rows each run reads in each step
head      the network; state: all runs' weights and moments, stacked, one row a run
losses    of many runs at once; dpo over all pairs in linear memory
pack      one step of all runs; validate: how well they do
packing   how many at once, and why
runner    from first step to last: early stopping, places taken again, memory that runs short
"""
