"""A model folder as something to talk to: its weights, its tokenizer, its chat template, and how it reads messages.

conversation   a causal model with a chat template: it gets all messages
questions      an encoder-decoder, which was trained on single questions: it gets the last one
continuation   a causal model without a template: it continues the last message as a text
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from brimful.errors import BadOption
from brimful.tasks.generate import GenerateOptions, Generator, weights_dtype
from brimful.tasks.model_folder import is_causal, load_model, read_config, resolve, tokenizer_of

if TYPE_CHECKING:
    import torch

    from brimful.tasks.chat_template import ChatTemplate

Manner: TypeAlias = Literal["questions", "conversation", "continuation"]
"""How a model is talked to."""


class ChatModel:
    """A loaded model with everything that turns messages into its tokens."""

    def __init__(
        self,
        model: str | Path,
        options: GenerateOptions,
        *,
        device: "torch.device",
        autocast: "torch.dtype | None" = None,
    ) -> None:
        from brimful.memory.context import forward_context

        self.folder, self.device = resolve(model), device
        config = read_config(self.folder)
        tokenizer = tokenizer_of(self.folder, config)
        self.template = _template_of(self.folder) if is_causal(config) else None
        self.manner: Manner = (
            "questions" if not is_causal(config) else "continuation" if self.template is None else "conversation"
        )
        self.generator = Generator(
            load_model(self.folder, device, weights_dtype(config, device)),
            tokenizer,
            options,
            device=device,
            autocast=lambda: forward_context(device, autocast),
            end_ids=self.template.end_ids if self.template else (),
        )

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens after which the model writes its reply. The last message is the user's."""
        if self.template is not None:
            return self.template.prompt(messages)
        if system := [message["content"] for message in messages if message["role"] == "system"]:
            raise BadOption(
                f"system={system[0]!r} needs a chat template, and {self.folder} has none. Try: leave it out."
            )
        return self.text_prompt(messages[-1]["content"])

    def text_prompt(self, text: str) -> list[int]:
        """A plain text: what an encoder-decoder reads, or what a causal model continues."""
        tokenizer = self.generator.tokenizer
        return tokenizer.encode(text) if self.manner == "questions" else tokenizer.begin(text)


def _template_of(folder: Path) -> "ChatTemplate | None":
    """The chat template of a model; None for a base model without one."""
    from brimful.tasks.chat_template import ChatTemplate, load_auto_tokenizer

    return ChatTemplate.load(folder) if load_auto_tokenizer(folder).chat_template else None
