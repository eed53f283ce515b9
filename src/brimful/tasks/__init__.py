"""The built-in language tasks, and how a task is loaded from what the user typed.

load            a task from a built-in name or `file.py:name`
option_fields   dataclasses of options as flags, TOML and help
language        `pretrain` and `sft`: their options, and what they have in common for all models
preference      `dpo`: its options and losses
encoder_decoder batches and loss of models such as T5
causal_lm       batches and loss of models such as Qwen and Llama
causal_data     their rows as tokens: chat_template writes conversations, reply_spans finds the replies
special_tokens  special tokens told apart from text that looks like them
pair_data       preferences as tokens
pair_batches    batches of preferences, and the log-probabilities of their replies
preference_signals  warnings of `dpo`
presets         names for new models
token_stores    raw files to a token store
reference       what the reference of `dpo` says about all pairs, computed once
adapters        LoRA, DoRA and QLoRA
export          a model folder for other programs
rejects         rejected answers for pairs: reject_prompts has the questions, reject_filter the answers that are kept
check_rows      rows as a model reads them, for `brimful data check`
pair_scores     preference scores for `brimful eval`
chat_scores     BLEU and chrF, in training and for `brimful eval`
generate        answers in batches or streamed
model_folder    a saved model with its tokenizer
demo            the rows of `brimful demo`
"""
