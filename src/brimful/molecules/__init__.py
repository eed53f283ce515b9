"""Small heads on precomputed features, many at once: the molecular preference experiments as one job.

A card that one small run cannot fill is filled with more runs, not with a larger batch, which would change what is
trained. `brimful sweep SPEC.toml` takes a grid (datasets × encoders × methods × seeds × hyper-parameters) and goes

    spec        the grid, checked before anything runs
    molecules   rows that can be read; the others are listed
    splits      in-distribution and out-of-distribution molecules, each for training, validation and testing
    features    of the molecules in use, computed once, memory-mapped
    pack        runs of one shape trained together, each exactly as it would be alone
    scores      one number a test molecule, higher for what looks out of distribution
    results     tables, parquet and a page, with the trivial baselines that expose a leaky split
"""
