"""One exact optimizer step, whatever memory does: the heart of Brimful."""
