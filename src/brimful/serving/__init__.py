"""Answers requests that come one by one: a server with the OpenAI API, and a talk in the terminal, over one engine.

chat_model      a model folder as something to talk to: its tokenizer, its chat template, how it reads messages
answer          a prompt, and its answer while it is being written
batch           rows that are decoded together, which others can join and leave
replayed_batch  the same rows in a cache of fixed size, so that one CUDA graph computes each token
sampling        the next token of each row, each chosen in its own way
admission       how many requests fit: the predicted memory of a batch
metrics         what the engine does and did, as figures
engine          the thread that owns the model: admits, decodes, recovers from out-of-memory errors
chat            a talk in the terminal
api             requests and responses of the OpenAI API
server          HTTP: routes, streaming, token, limits, metrics, shutdown
"""
