"""Sets of options for `brimful train --recipe NAME`, as TOML files with the reason beside each value.

A recipe holds what decides the result (rows per step, learning rate, passes) and what the user can spare (host RAM, disk).
What memory decides, the micro-batch first of all, is in none of them: that is measured where the run starts.
"""
