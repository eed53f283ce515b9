"""`brimful data clean`: normalize, drop, deduplicate, shuffle and split, out of core.

clean       the command: its stages in order, and its report
prepare     the options, and what they do to a chunk of rows
segments    prepared rows on disk, read back in random order
duplicates  which rows came before, exactly or nearly
write       the splits as parquet files, the work folder, disk space
"""
