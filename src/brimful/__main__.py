"""`python -m brimful`: the same as `brimful`."""

from brimful.cli import main

main()
