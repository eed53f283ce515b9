"""What a sweep is asked for: SPEC.toml read and checked as a whole, the methods there are, and the grid of runs it means.

Nothing here needs torch or RDKit.
"""
