"""`brimful data tokenizer`: a tokenizer trained on as much text as the memory allows, and its report."""
