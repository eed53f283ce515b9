"""Small tokenizers for tests of chat templates: of bytes as in Qwen and Llama 3, of pieces as in Llama 2 and Mistral."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The reply is short. Which river is longest? Probably the Nile, said the assistant to the user. system tool",
    "Hello there! How are you today? I am fine, thank you. What is the weather in Paris? It is sunny.\n\n### Response:\n",
    '{"name": "get_weather", "arguments": {"city": "Paris"}} <tool_call> </tool_call> User: Assistant: ASSISTANT: USER:',
    "今天天气怎么样？今天很好。你好，世界！ Answer: 42. Thinking step by step about the answer.",
]


@functools.cache
def _trained(kind):
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(CORPUS * 4, trainer)
        return tokenizer.to_str()
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", *bytes_], show_progress=False)
    words = [text.replace(" ", " ▁").split() for text in CORPUS * 4]
    tokenizer.train_from_iterator([word for one in words for word in one], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [one for one in content["added_tokens"] if not one["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.to_str()


def save_tokenizer(
    folder, *, kind="bytes", special=(), plain=(), eos="</s>", bos=None, pad=None, template=None, ends=None
):
    """A folder that AutoTokenizer loads. `special` are its special tokens, `plain` are added tokens that are not special."""
    tokenizer = Tokenizer.from_str(_trained(kind))
    tokens = dict.fromkeys(one for one in (bos, eos, pad, *special) if one)
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in tokens])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in plain])
    if bos:
        first = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        both = [tokenizer.post_processor, first] if tokenizer.post_processor else [first]
        tokenizer.post_processor = processors.Sequence(both)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": eos, "bos_token": bos, "pad_token": pad}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {role: token for role, token in roles.items() if token}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if ends is not None:
        ids = [tokenizer.token_to_id(one) for one in ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
