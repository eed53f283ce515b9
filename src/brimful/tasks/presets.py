"""Models that a name stands for, with new weights: `--model chatlm-base`.

`chatlm-base` is the T5 of ChatLM-mini-Chinese (187.7 M parameters, the tied head counted once) and `chatlm-tiny` its small
brother (1.2 M), which learns on a CPU in a minute. `causal-tiny` (0.9 M) and `causal-small` (34 M) are decoders in the shape
of Llama, for trials and demonstrations.

A new model has a new tokenizer, trained on the data, whose special tokens have the ids below. A causal one also needs to mark
the turns of a conversation; `CHAT_TEMPLATE` does it with those special tokens.

Nothing here imports torch.
"""

from dataclasses import dataclass
from typing import Any

from brimful.task import Shape

PAD, EOS = 0, 1
"""Ids in every tokenizer that Brimful trains."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
[BOS]{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}[EOS]{% endgeneration %}{% else %}{{ message.content }}[SEP]{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}[BOS]assistant
{% endif -%}
"""
"""The chat template of a new causal model: `[BOS]user`, a line break, the text and `[SEP]`; a reply ends with `[EOS]`."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A configuration with new weights, and the lengths and batch it is meant for."""

    model_type: str
    sizes: dict[str, int]
    vocab: int
    worst_shape: Shape
    global_batch: int

    @property
    def causal(self) -> bool:
        return self.model_type != "t5"

    def config(self) -> Any:
        """A new configuration of transformers."""
        from transformers import AutoConfig

        ids: dict[str, Any] = {"pad_token_id": PAD, "eos_token_id": EOS}
        ids |= {"bos_token_id": None, "tie_word_embeddings": True} if self.causal else {"decoder_start_token_id": PAD}
        return AutoConfig.for_model(self.model_type, vocab_size=self.vocab, **ids, **self.sizes)


def _t5(d_model: int, d_ff: int, heads: int, d_kv: int, layers: int) -> dict[str, int]:
    return {
        "d_model": d_model, "d_ff": d_ff, "num_heads": heads, "d_kv": d_kv, "num_layers": layers, "num_decoder_layers": layers,
    }  # fmt: skip


def _llama(width: int, inner: int, heads: int, key_heads: int, layers: int) -> dict[str, int]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": key_heads,
        "num_hidden_layers": layers, "max_position_embeddings": 4096,
    }  # fmt: skip


PRESETS: dict[str, Preset] = {
    "chatlm-tiny": Preset(
        model_type="t5", sizes=_t5(128, 256, 4, 32, 2), vocab=4096, worst_shape=(128, 128), global_batch=64
    ),
    "chatlm-base": Preset(
        model_type="t5", sizes=_t5(768, 3072, 12, 64, 10), vocab=29298, worst_shape=(256, 256), global_batch=256
    ),
    "causal-tiny": Preset(
        model_type="llama", sizes=_llama(128, 384, 4, 2, 2), vocab=4096, worst_shape=(256,), global_batch=64
    ),
    "causal-small": Preset(
        model_type="llama", sizes=_llama(512, 1536, 8, 4, 8), vocab=16384, worst_shape=(512,), global_batch=128
    ),
}
