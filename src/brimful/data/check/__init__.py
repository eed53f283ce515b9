"""`brimful data check`: what is in files of rows, and how much of it is usable."""
