"""`brimful data clean`: normalise, drop, deduplicate, shuffle and split, out of core."""
