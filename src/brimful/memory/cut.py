"""Rows dealt to processes. Every row comes once; only who computes it is decided here."""


def deal(rows: int, processes: int) -> tuple[int, ...]:
    """So many rows over so many processes, as even as can be: 250 over 3 is 84, 83, 83."""
    share, left = divmod(rows, processes)
    return tuple(share + (index < left) for index in range(processes))
