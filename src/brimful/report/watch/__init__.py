"""`brimful watch`: a run in the terminal. Measuring is apart from drawing: first a frozen `Snapshot`, then lines of text.

    watcher.py             which run to look at, whether it goes on, what NVML says now     →  Snapshot
      └── run_snapshot.py  the Snapshot, and what the run's folder says
    watch_screen.py        a Snapshot at a given size, and its curves                    →  what is printed
      ├── watch_parts.py   header, cards and RAM, time of a step, scores, checkpoints, errors, notes
      └── watch_canvas.py  words, bars, sparklines and charts in terminal cells, in Unicode or ASCII

The run's folder is only read, at most once a second, and neither torch nor a CUDA context is needed.
"""
