"""From files of rows to batches, within bounded host RAM.

    files ─► read/        rows of any format under common names, in chunks; unreadable rows with file and line
      │        ├─► check.py      what is in the files and how many rows are usable
      │        ├─► clean/        normalize, drop, deduplicate, shuffle, split: parquet out, every dropped row counted
      │        ├─► tokenizer/    a tokenizer trained on a sample that fits in RAM
      │        └─► tokenize.py   encode.py: texts ─► tokens ─► store.py: memory-mapped, checksummed, shared by all processes
      │            pipeline.py   what these commands share: threads, peak memory, the output folder
      ▼
    store (or any map-style dataset)
      └─► batches.py: the rows of a step, dealt to ranks ─► reader.py: read, split, collated ─► loader.py: prefetching workers

No dataset is held in memory: what is needed depends on the size of a chunk and of a batch, not on the number of rows.
"""
