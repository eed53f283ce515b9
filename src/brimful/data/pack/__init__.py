"""`brimful data pack`: rows to tokens, in parallel, into a token store."""
