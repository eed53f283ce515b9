"""The built-in chat tasks, and how a task is loaded from what the user typed.

load            a task from a built-in name or `file.py:name`
option_fields   dataclasses of options as flags, TOML and help
chatlm          `chatlm-pretrain` and `chatlm-sft`: an encoder-decoder that answers prompts
chat_data       raw files to a token store
chat_scores     BLEU and chrF, in training and for `brimful eval`
generate        answers in batches or streamed
model_folder    a saved model with its tokenizer
demo            the rows of `brimful demo`
"""
