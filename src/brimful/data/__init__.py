"""Rows in, batches out, within a host-RAM budget: reading, cleaning, tokenising, storing, and feeding a training.

    files ─► source (read/)   rows of any format under common names, in chunks; what cannot be read, with file and line
      │        ├─► check/        what is in there, and how much of it is usable
      │        ├─► clean/        normalise, drop, deduplicate, shuffle, split: parquet out, every dropped row counted
      │        ├─► tokenizer/    a tokenizer trained on a sample that fits the RAM
      │        └─► pack/         tokens ─► store/: memory-mapped, checksummed, shared by every worker and process
      ▼
    store (or any map-style data set) ─► stream: every row once per pass, in an order that is computed, not kept
      └─► batches: a step's rows, dealt ─► reader: read, cut, collated ─► loader: workers that read ahead ─► train/step

Nothing in here holds a data set: memory depends on the size of a chunk and of a batch, not on the number of rows.
"""
