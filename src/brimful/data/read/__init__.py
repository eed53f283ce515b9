"""Files of any format to rows with common names.

source         opens paths and reads their rows in chunks: what every data command uses
files          paths to files, and what all readers share: chunks, row problems, byte streams
columns        which columns hold the prompt, the response or the text
conversations  the same for rows of whole conversations, in OpenAI's format
preferences    the same for rows of two replies to one prompt
json_rows      readers for jsonl and json
plain_text     reader for .txt
tables         readers for csv, tsv, parquet and the Hugging Face hub
"""
