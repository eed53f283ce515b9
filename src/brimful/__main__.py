"""`python -m brimful`: the same as `brimful`."""

from brimful.cli.app import main

main()
