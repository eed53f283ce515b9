"""`brimful data tokenizer`: a tokenizer trained on as much text as the memory allows.

train       the command: sample, train, measure on held-out rows, report
sample      which rows are used, and the memory that training on them takes
vocabulary  from texts to a vocabulary: byte pairs or unigram
folder      tokenizer folders in the Hugging Face layout, read and written
"""
