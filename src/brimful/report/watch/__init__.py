"""`brimful watch`: a run in the terminal. Measuring is apart from drawing: first a frozen `Snapshot`, then lines of text.

    watcher.py         which run to look at, whether it goes on, what NVML says now      →  Snapshot
      ├── take_snapshot.py  what the run's folder says
      └── run_snapshot.py   the Snapshot itself
    watch_screen.py    a Snapshot in so many columns and lines                            →  what is printed
      ├── watch_parts.py    header, progress, time of a step, scores, checkpoints, errors, notes
      ├── memory_table.py   cards and RAM
      ├── curves.py         loss, rows/s, memory, utilisation and learning rate over the steps
      └── cells.py          words, sizes and times in terminal cells
            └── sparklines.py   bars, sparklines and line charts, in Unicode or ASCII

The run's folder is only read, at most once a second, and neither torch nor a CUDA context is needed.
"""
