"""Which tokens of a conversation are trained on, for templates in the formats of models people fine-tune."""

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from brimful.errors import BadData, BadModel
from brimful.tasks.chat_template import ChatTemplate, RowError, check_vocabulary, pieces, preview
from tests.tasks.chat_tokenizers import save_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
IM = ("<|im_start|>", "<|im_end|>")
HEADER = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TURN = ("<start_of_turn>", "<end_of_turn>")
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>")
DEEPSEEK_TOOLS = tuple(
    f"<｜tool▁{name}｜>"
    for name in (
        "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep",
        "outputs▁begin", "outputs▁end", "output▁begin", "output▁end",
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Format:
    """A template, its tokens, and what it prints for a conversation, written by hand: «trained» text is marked."""

    talk: str
    """For TALK."""
    special: tuple[str, ...] = ()
    eos: str = "</s>"
    bos: str | None = None
    end: str | None = None
    """What ends every reply. Default: eos."""
    middle: str | None = None
    """What ends a reply that is not the last. Default: the same."""
    lead: str = ""
    """What the template prints between the generation prompt and a reply."""
    last_lead: str = ""
    """The same, only before the last reply."""
    trims: bool = False
    system: str | None = ""
    """For SYSTEM_TALK, if it was written by hand too; None where the template refuses system messages."""
    tool_talk: str | None = None
    """For TOOL_TALK; None where the template knows no tools."""
    ends: tuple[str, ...] | None = None
    """In generation_config.json."""
    method: str = "sentinel"

    def ending(self, last):
        end = self.eos if self.end is None else self.end
        return end if last or self.middle is None else self.middle


def im(text, system=""):
    """A conversation in ChatML, with ‹ and › for its tokens."""
    return (system + text).replace("‹", "<|im_start|>").replace("›", "<|im_end|>")


TALK = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "Fine."},
    {"role": "assistant", "content": "Fine."},
]
SYSTEM_TALK = [{"role": "system", "content": "Be kind."}, *TALK[:2]]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
TOOL_TALK = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Tells it.", "parameters": {}}}]
CHATML = "‹user\nHi.›\n‹assistant\n«Fine.›»\n‹user\nFine.›\n‹assistant\n«Fine.›»\n"
CHATML_SYSTEM = "‹system\nBe kind.›\n‹user\nHi.›\n‹assistant\n«Fine.›»\n"
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QWEN_TOOLS = f"‹user\nWeather?›\n‹assistant\n«{HERMES_CALL}›»\n‹user\n<tool_response>\nsunny\n</tool_response>›\n"

FORMATS = {
    "chatml": Format(special=IM, end="<|im_end|>", talk=im(CHATML), system=im(CHATML_SYSTEM)),
    "qwen2_5": Format(
        special=IM, eos="<|im_end|>", end="<|im_end|>",
        talk=im(CHATML, "‹system\nYou are a kind test assistant.›\n"), system=im(CHATML_SYSTEM),
        tool_talk=im(QWEN_TOOLS + "‹assistant\n«It is sunny.›»\n"),
    ),
    "qwen3": Format(
        special=IM, eos="<|im_end|>", end="<|im_end|>", last_lead="<think>\n\n</think>\n\n",
        talk=im("‹user\nHi.›\n‹assistant\n«Fine.›»\n‹user\nFine.›\n‹assistant\n«<think>\n\n</think>\n\nFine.›»\n"),
        system=im("‹system\nBe kind.›\n‹user\nHi.›\n‹assistant\n«<think>\n\n</think>\n\nFine.›»\n"),
        tool_talk=im(QWEN_TOOLS + "‹assistant\n«<think>\n\n</think>\n\nIt is sunny.›»\n"),
    ),
    "yi": Format(special=IM, end="<|im_end|>", talk=im(CHATML), system=im(CHATML_SYSTEM)),
    "internlm2": Format(special=IM, bos="<s>", end="<|im_end|>", talk=im(CHATML, "<s>"), system=im(CHATML_SYSTEM, "<s>")),
    "smollm2": Format(
        special=IM, end="<|im_end|>", talk=im(CHATML, "‹system\nYou are a small helper.›\n"), system=im(CHATML_SYSTEM)
    ),
    "phi4": Format(
        special=(*IM, "<|im_sep|>"), end="<|im_end|>",
        talk=im("‹user<|im_sep|>Hi.›‹assistant<|im_sep|>«Fine.›»‹user<|im_sep|>Fine.›‹assistant<|im_sep|>«Fine.›»"),
        system=im("‹system<|im_sep|>Be kind.›‹user<|im_sep|>Hi.›‹assistant<|im_sep|>«Fine.›»"),
    ),
    "llama2": Format(
        bos="<s>", lead=" ", end=" </s>", trims=True,
        talk="<s>[INST] Hi. [/INST]« Fine. </s>»<s>[INST] Fine. [/INST]« Fine. </s>»",
        system="<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi. [/INST]« Fine. </s>»",
    ),
    "llama3": Format(
        special=HEADER, bos="<|begin_of_text|>", eos="<|end_of_text|>", end="<|eot_id|>", trims=True,
        talk="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Fine.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nFine.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Fine.<|eot_id|>»",
    ),
    "llama3_1": Format(
        special=HEADER, bos="<|begin_of_text|>", eos="<|eot_id|>", end="<|eot_id|>", trims=True, ends=("<|eom_id|>", "<|eot_id|>"),
        talk="…<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Fine.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nFine.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Fine.<|eot_id|>»",
        tool_talk="…Weather?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '«{"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>»'
        "<|start_header_id|>ipython<|end_header_id|>\n\nsunny<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«It is sunny.<|eot_id|>»",
    ),
    "gemma2": Format(
        special=TURN, bos="<bos>", eos="<eos>", end="<end_of_turn>", trims=True, system=None,
        talk="<bos><start_of_turn>user\nHi.<end_of_turn>\n<start_of_turn>model\n«Fine.<end_of_turn>»\n"
        "<start_of_turn>user\nFine.<end_of_turn>\n<start_of_turn>model\n«Fine.<end_of_turn>»\n",
    ),
    "gemma3": Format(
        special=TURN, bos="<bos>", eos="<eos>", end="<end_of_turn>", trims=True,
        talk="<bos><start_of_turn>user\nHi.<end_of_turn>\n<start_of_turn>model\n«Fine.<end_of_turn>»\n"
        "<start_of_turn>user\nFine.<end_of_turn>\n<start_of_turn>model\n«Fine.<end_of_turn>»\n",
        system="<bos><start_of_turn>user\nBe kind.\n\nHi.<end_of_turn>\n<start_of_turn>model\n«Fine.<end_of_turn>»\n",
    ),
    "mistral_v1": Format(
        bos="<s>", system=None, talk="<s>[INST] Hi. [/INST]«Fine.</s>» [INST] Fine. [/INST]«Fine.</s>» ",
    ),
    "mixtral": Format(
        bos="<s>", lead=" ", talk="<s> [INST] Hi. [/INST]« Fine.</s>» [INST] Fine. [/INST]« Fine.</s>»",
        system="<s> [INST] Be kind.\n\nHi. [/INST]« Fine.</s>»",
    ),
    "mistral_v3": Format(
        special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        bos="<s>", lead=" ", trims=True, talk="<s>[INST] Hi.[/INST]« Fine.</s>»[INST] Fine.[/INST]« Fine.</s>»",
        system="<s>[INST] Be kind.\n\nHi.[/INST]« Fine.</s>»",
        tool_talk='…[INST] Weather?[/INST]«[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]</s>»'
        '[TOOL_RESULTS] {"content": sunny, "call_id": "abcdefghi"}[/TOOL_RESULTS]« It is sunny.</s>»',
    ),
    "mistral_tekken": Format(
        special=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), bos="<s>",
        talk="<s>[SYSTEM_PROMPT]You answer tests.[/SYSTEM_PROMPT][INST]Hi.[/INST]«Fine.</s>»[INST]Fine.[/INST]«Fine.</s>»",
        system="<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]Hi.[/INST]«Fine.</s>»",
    ),
    "phi3": Format(
        special=(*ROLES, "<|end|>"), eos="<|endoftext|>", end="<|end|>",
        talk="<|user|>\nHi.<|end|>\n<|assistant|>\n«Fine.<|end|>»\n<|user|>\nFine.<|end|>\n<|assistant|>\n«Fine.<|end|>»\n<|endoftext|>",
    ),
    "zephyr": Format(
        special=ROLES, talk="<|user|>\nHi.</s>\n<|assistant|>\n«Fine.</s>»\n<|user|>\nFine.</s>\n<|assistant|>\n«Fine.</s>»\n",
        system="<|system|>\nBe kind.</s>\n<|user|>\nHi.</s>\n<|assistant|>\n«Fine.</s>»\n",
    ),
    "tinyllama": Format(
        talk="<|user|>\nHi.</s>\n<|assistant|>\n«Fine.</s>»\n<|user|>\nFine.</s>\n<|assistant|>\n«Fine.</s>»\n",
    ),
    "vicuna": Format(
        lead=" ", trims=True, talk="A person talks with a machine. USER: Hi. ASSISTANT:« Fine.</s>» USER: Fine. ASSISTANT:« Fine.</s>»",
        system="Be kind. USER: Hi. ASSISTANT:« Fine.</s>»",
    ),
    "alpaca": Format(
        middle="", talk="Below is a task. Solve it.\n\n### Instruction:\nHi.\n\n### Response:\n«Fine.»\n\n"
        "### Instruction:\nFine.\n\n### Response:\n«Fine.</s>»",
    ),
    "deepseek_v2": Format(
        bos="<s>", lead=" ", talk="<s>User: Hi.\n\nAssistant:« Fine.</s>»User: Fine.\n\nAssistant:« Fine.</s>»",
    ),
    "deepseek_v3": Format(
        special=(*DEEPSEEK, *DEEPSEEK_TOOLS), bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>",
        talk="<｜begin▁of▁sentence｜><｜User｜>Hi.<｜Assistant｜>«Fine.<｜end▁of▁sentence｜>»<｜User｜>Fine.<｜Assistant｜>«Fine.<｜end▁of▁sentence｜>»",
        system="<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi.<｜Assistant｜>«Fine.<｜end▁of▁sentence｜>»",
        tool_talk="<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜>«<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>»'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜><｜tool▁outputs▁end｜>«It is sunny.<｜end▁of▁sentence｜>»",
    ),
    "deepseek_r1": Format(
        special=DEEPSEEK, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>",
        talk="<｜begin▁of▁sentence｜><｜User｜>Hi.<｜Assistant｜>«Fine.<｜end▁of▁sentence｜>»<｜User｜>Fine.<｜Assistant｜>«Fine.<｜end▁of▁sentence｜>»",
    ),
    "baichuan2": Format(
        special=("<reserved_106>", "<reserved_107>"), middle="",
        talk="<reserved_106>Hi.<reserved_107>«Fine.»<reserved_106>Fine.<reserved_107>«Fine.</s>»",
    ),
    "glm4": Format(
        special=("[gMASK]", "<sop>", "<|observation|>", *ROLES), eos="<|endoftext|>", middle="<|user|>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        talk="[gMASK]<sop><|user|>\nHi.<|assistant|>\n«Fine.<|user|>»\nFine.<|assistant|>\n«Fine.<|endoftext|>»",
        tool_talk='…<|user|>\nWeather?<|assistant|>«get_weather\n{"city": "Paris"}<|observation|>»\nsunny<|assistant|>\n«It is sunny.<|endoftext|>»',
    ),
    "command_r": Format(
        special=tuple(f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "USER", "CHATBOT", "SYSTEM")),
        bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", trims=True,
        talk="<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«Fine.<|END_OF_TURN_TOKEN|>»"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Fine.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«Fine.<|END_OF_TURN_TOKEN|>»",
    ),
    "falcon": Format(
        lead=" ", middle="", eos="<|endoftext|>", talk="User: Hi.\nFalcon:« Fine.»\nUser: Fine.\nFalcon:« Fine.<|endoftext|>»",
        system="System: Be kind.\nUser: Hi.\nFalcon:« Fine.<|endoftext|>»",
    ),
    "smollm3": Format(
        special=IM, eos="<|im_end|>", method="generation tag",
        talk=im("…You think first.›\n" + CHATML), system=im("…Be kind.›\n‹user\nHi.›\n‹assistant\n«Fine.›»\n"),
    ),
    "olmo": Format(
        special=ROLES, eos="<|endoftext|>",
        talk="<|endoftext|><|user|>\nHi.\n<|assistant|>\n«Fine.<|endoftext|>»\n<|user|>\nFine.\n<|assistant|>\n«Fine.<|endoftext|>»",
    ),
    "granite": Format(
        special=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), eos="<|end_of_text|>",
        talk="<|start_of_role|>user<|end_of_role|>Hi.<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>«Fine.<|end_of_text|>»\n"
        "<|start_of_role|>user<|end_of_role|>Fine.<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>«Fine.<|end_of_text|>»\n",
        tool_talk="…<|start_of_role|>user<|end_of_role|>Weather?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        '«<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|end_of_text|>»\n'
        "<|start_of_role|>tool_response<|end_of_role|>sunny<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>«It is sunny.<|end_of_text|>»\n",
    ),
    "stablelm": Format(
        special=ROLES, eos="<|endoftext|>",
        talk="<|user|>\nHi.<|endoftext|>\n<|assistant|>\n«Fine.<|endoftext|>»\n<|user|>\nFine.<|endoftext|>\n<|assistant|>\n«Fine.<|endoftext|>»\n",
    ),
    "openchat": Format(
        special=("<|end_of_turn|>",), bos="<s>", lead=" ", end="<|end_of_turn|>",
        talk="<s>GPT4 Correct User: Hi.<|end_of_turn|>GPT4 Correct Assistant:« Fine.<|end_of_turn|>»"
        "GPT4 Correct User: Fine.<|end_of_turn|>GPT4 Correct Assistant:« Fine.<|end_of_turn|>»",
    ),
    "generation_tags": Format(
        special=IM, bos="<s>", end="<|im_end|>", talk=im(CHATML, "<s>"), system=im(CHATML_SYSTEM, "<s>"), method="generation tag"
    ),
    "generation_tags_bare": Format(
        special=ROLES, method="generation tag",
        talk="<|user|>\nHi.\n<|assistant|>\n«Fine.</s>»\n<|user|>\nFine.\n<|assistant|>\n«Fine.</s>»\n",
    ),
    "two_ends": Format(
        special=("<|begin|>", "<|human|>", "<|bot|>", "<|answer|>", "<|answer_end|>", "<|turn_end|>"), bos="<s>",
        lead="<|answer|>", end="<|answer_end|><|turn_end|>",
        talk="<s><|begin|><|human|>Hi.<|turn_end|><|begin|><|bot|>«<|answer|>Fine.<|answer_end|><|turn_end|>»"
        "<|begin|><|human|>Fine.<|turn_end|><|begin|><|bot|>«<|answer|>Fine.<|answer_end|><|turn_end|>»",
    ),
    "channels": Format(
        special=("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"), eos="<|return|>",
        ends=("<|return|>", "<|call|>"), lead="<|channel|>final<|message|>", middle="<|end|>",
        talk="<|start|>system<|message|>Channels: thought, final.<|end|><|start|>user<|message|>Hi.<|end|>"
        "<|start|>assistant«<|channel|>final<|message|>Fine.<|end|>»"
        "<|start|>user<|message|>Fine.<|end|><|start|>assistant«<|channel|>final<|message|>Fine.<|return|>»",
        tool_talk="…<|start|>user<|message|>Weather?<|end|><|start|>assistant"
        '« to=get_weather<|channel|>call<|message|>{"city": "Paris"}<|call|>»<|start|>tool to=assistant<|message|>sunny<|end|>'
        "<|start|>assistant«<|channel|>final<|message|>It is sunny.<|return|>»",
    ),
    "results_inside_calls": Format(
        special=("<|turn>", "<turn|>", "<|call>", "<call|>", "<|result>", "<result|>"), bos="<s>", end="<turn|>",
        talk="<s><|turn>user\nHi.<turn|>\n<|turn>model\n«Fine.<turn|>»\n<|turn>user\nFine.<turn|>\n<|turn>model\n«Fine.<turn|>»\n",
        tool_talk='<s><|turn>user\nWeather?<turn|>\n<|turn>model\n«<|call>get_weather{"city": "Paris"}<call|>»'
        "<|result>sunny<result|>«It is sunny.<turn|>»\n",
    ),
    "parts_only": Format(special=IM, end="<|im_end|>", talk=im(CHATML), system=im(CHATML_SYSTEM)),
}  # fmt: skip

REPLIES = {
    "one turn": ["It is sunny."],
    "three turns": ["It is sunny.", "Yes.", "No, thank you."],
    "the same reply": ["Fine.", "Fine.", "Fine."],
    "the text of a question": ["Question 1?", "Question 0?"],
    "the text of all questions": ["Question 0?Question 1?", "user\nQuestion 1?"],
    "part of another reply": ["a", "a a", "a a a"],
    "blanks around": ["  padded \t"],
    "blank lines around": ["\n\nYes.\n"],
    "Chinese": ["今天天气很好。", "你好，世界！"],
    "emoji": ["🙂", "👩‍👩‍👧 ok 🇨🇳"],
    "headers": ["### Response:\nYes.\n\n### Instruction:\nNo.", "ASSISTANT: a USER: b [/INST] c\nFalcon: d"],
    "control characters": ["a\x00b\r\nc", "\u200bd\u00a0"],
    "Jinja": ["{{ messages }} {% generation %}"],
}


def questions(replies):
    turns = [("user", f"Question {number}?") for number in range(len(replies))]
    pairs = zip(turns, [("assistant", reply) for reply in replies], strict=True)
    return [{"role": role, "content": content} for pair in pairs for role, content in pair]


def runs(template, row):
    return [text for text, trained in pieces(template, row) if trained]


def expected_runs(form, replies):
    shown = [reply.strip() if form.trims else reply for reply in replies]
    last = len(shown) - 1
    leads = [form.lead + form.last_lead * (number == last) for number in range(len(shown))]
    return [
        lead + reply + form.ending(number == last)
        for number, (lead, reply) in enumerate(zip(leads, shown, strict=True))
    ]


def marked(template, row):
    return "".join(f"«{text}»" if trained else text for text, trained in pieces(template, row))


def load(folder, name, kind="bytes"):
    form = FORMATS[name]
    save_tokenizer(
        folder, kind=kind, special=form.special, plain=("<think>", "</think>", "<tool_call>", "</tool_call>"), eos=form.eos,
        bos=form.bos, ends=form.ends, template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
    )  # fmt: skip
    return ChatTemplate.load(folder)


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """By name and kind of tokenizer, loaded once."""
    loaded, folder = {}, tmp_path_factory.mktemp("templates")

    def get(name, kind="bytes"):
        if (name, kind) not in loaded:
            loaded[name, kind] = load(folder / f"{name}-{kind}", name, kind)
        return loaded[name, kind]

    return get


every_format = pytest.mark.parametrize("name", FORMATS)


class TestEveryFormat:
    @every_format
    def test_what_is_trained_was_written_by_hand(self, templates, name):
        template, form = templates(name), FORMATS[name]
        (row,) = template.encode(TALK)
        assert _same(marked(template, row), form.talk)
        assert template.method == form.method

    @every_format
    def test_a_system_message_is_context_or_refused(self, templates, name):
        template, form = templates(name), FORMATS[name]
        if form.system is None:
            with pytest.raises(RowError, match="refuses the roles system, user, assistant"):
                template.encode(SYSTEM_TALK)
            return
        (row,) = template.encode(SYSTEM_TALK)
        if form.system:
            assert _same(marked(template, row), form.system)
        assert "Be kind." in template.decode(row.tokens)
        assert runs(template, row) == expected_runs(form, ["Fine."])

    @pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.tool_talk])
    @pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'], ids=["object", "JSON"])
    def test_tool_calls_are_trained_and_results_are_not(self, templates, name, arguments):
        template = templates(name)
        call = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
        (row,) = template.encode([TOOL_TALK[0], {**TOOL_TALK[1], "tool_calls": [call]}, *TOOL_TALK[2:]], TOOLS)
        text = marked(template, row)
        expected = FORMATS[name].tool_talk
        assert text.endswith(expected.removeprefix("…")) if not name.startswith("qwen") else expected in text
        prints_tools = "tools" in (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        assert ("Tells it." in text.partition("«")[0]) == prints_tools

    @every_format
    @pytest.mark.parametrize("kind", ["bytes", "pieces"])
    def test_exactly_replies_and_ends_are_trained(self, templates, name, kind):
        template, form = templates(name, kind), FORMATS[name]
        for case, replies in REPLIES.items():
            (row,) = template.encode(questions(replies))
            expected = expected_runs(form, replies)
            found = runs(template, row)
            if kind == "pieces":  # whose decoder drops and adds blanks, and takes ▁ for one
                found = [one.replace(" ", "") for one in found]
                expected = [one.replace(" ", "").replace("▁", "") for one in expected]
            if name == "smollm3" or (name == "qwen3" and len(replies) == 1):
                expected = [one.replace("</think>\n\n\n\n", "</think>\n\n").lstrip("\n") for one in expected]
            assert found == expected, case

    @every_format
    def test_an_empty_question_is_only_context(self, templates, name):
        template, form = templates(name), FORMATS[name]
        (row,) = template.encode([{"role": "user", "content": ""}, {"role": "assistant", "content": "Yes."}])
        assert runs(template, row) == expected_runs(form, ["Yes."])

    @every_format
    def test_text_like_special_tokens_is_plain_text(self, templates, name):
        template, form = templates(name), FORMATS[name]
        tokens = " ".join(
            dict.fromkeys(one for one in (form.eos, form.bos, *form.special) if one and "tool" not in one.lower())
        )
        talk = questions([f"Write {tokens}!", "Yes."])
        talk[0]["content"] = f"What is {tokens}?"
        (row,) = template.encode(talk)
        assert runs(template, row) == expected_runs(form, [f"Write {tokens}!", "Yes."])
        (plain,) = template.encode(questions(["Write it!", "Yes."]))
        special = set(template.tokenizer.all_special_ids) | set(template.end_ids)
        assert [one for one in row.tokens if one in special] == [one for one in plain.tokens if one in special]

    @every_format
    def test_the_prompt_is_what_stands_before_a_reply(self, templates, name):
        template = templates(name)
        (row,) = template.encode(TALK[:2])
        first = row.trained.index(True)
        prompt = template.prompt(TALK[:1])
        if name == "deepseek_r1":  # whose prompt begins a thought that the reply does not have
            assert template.decode(prompt).endswith("<think>\n")
        elif name == "tinyllama":  # whose prompt has one more line end
            assert template.decode(prompt) == template.decode(row.tokens[:first]) + "\n"
        else:
            assert prompt == row.tokens[:first]

    @pytest.mark.parametrize("name", sorted(set(FORMATS) - {"deepseek_r1", "tinyllama"}))
    @pytest.mark.parametrize("kind", ["bytes", "pieces"])
    def test_a_reply_of_a_pair_has_its_tokens_of_the_conversation(self, templates, name, kind):
        template = templates(name, kind)
        ((prompt, reply),) = template.reply_batch([(TALK, None)])
        whole = template.encode(TALK)[-1].tokens
        assert prompt == template.prompt(TALK[:-1])
        assert prompt + reply == whole[: len(prompt + reply)] and reply[-1] in template.end_ids

    @every_format
    def test_the_first_end_id_ends_a_reply(self, templates, name):
        template = templates(name)
        (row,) = template.encode(TALK)
        trained = [one for one, mark in zip(row.tokens, row.trained, strict=True) if mark]
        assert trained[-1] == template.end_ids[0] and template.eos_id in template.end_ids

    @every_format
    def test_the_tokens_are_those_of_transformers(self, templates, name):
        template = templates(name)
        talk = (
            [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TALK]
            if name == "parts_only"
            else TALK
        )
        theirs = template.tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
        (row,) = template.encode(TALK)
        assert row.tokens[: len(theirs)] == theirs or (
            row.tokens[-1] == template.eos_id and theirs[: len(row.tokens) - 1] == row.tokens[:-1]
        )


def _same(text, expected):
    """Equal, or equal at the end where the beginning was not written down (a date, tools)."""
    return text.endswith(expected[1:]) if expected.startswith("…") else text == expected


def test_a_wrong_mark_would_be_noticed(templates):
    """The checks above can fail: with one token more or less, the marked text is another."""
    template = templates("chatml")
    (row,) = template.encode(TALK)
    first = row.trained.index(True)
    for place in (first - 1, first):
        row.trained[place] = not row.trained[place]
        assert marked(template, row) != FORMATS["chatml"].talk
        row.trained[place] = not row.trained[place]
    assert marked(template, row) == FORMATS["chatml"].talk


def test_there_are_more_than_two_dozen_formats():
    assert len(FORMATS) >= 24 and {f"{name}.jinja" for name in FORMATS} < {file.name for file in TEMPLATES.iterdir()}


class TestSystemMessages:
    @pytest.mark.parametrize("name", ["qwen2_5", "vicuna", "phi3", "mixtral", "mistral_v3", "llama3_1"])
    def test_a_developer_message_is_one(self, templates, name):
        template = templates(name)
        talk = [{"role": "developer", "content": "Be kind."}, *TALK[:2]]
        text = template.decode(template.encode(talk)[0].tokens)
        assert "Be kind." in text and ("developer" in text) == (name == "llama3_1")

    def test_one_that_is_not_printed_is_an_error(self, templates):
        talk = [*TALK[:2], {"role": "system", "content": "Be brief."}, *TALK[2:]]
        with pytest.raises(RowError, match="message 3 has the role system, and the chat template does not print it"):
            templates("yi").encode(talk)
        template = templates("qwen2_5")
        assert "Be brief." in template.decode(template.encode(talk)[0].tokens)


class TestSystemMessageInPromptOnly:
    """Mistral's templates print it before the last message alone, and only if that is a question."""

    def test_each_reply_is_a_row_with_the_system_message(self, templates):
        template = templates("mistral_v3")
        rows = template.encode([*SYSTEM_TALK, *TALK[2:]])
        assert [marked(template, row) for row in rows] == [
            "<s>[INST] Be kind.\n\nHi.[/INST]« Fine.</s>»",
            "<s>[INST] Hi.[/INST] Fine.</s>[INST] Be kind.\n\nFine.[/INST]« Fine.</s>»",
        ]

    def test_without_one_it_is_a_single_row(self, templates):
        assert len(templates("mistral_v3").encode(TALK)) == 1

    def test_tool_calls(self, templates):
        template = templates("mistral_v3")
        rows = template.encode([SYSTEM_TALK[0], *TOOL_TALK], TOOLS)
        call = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]</s>'
        assert [runs(template, row) for row in rows] == [[call], [" It is sunny.</s>"]]
        assert "Be kind.\n\nWeather?" in template.decode(rows[0].tokens)


class TestReasoning:
    def test_thoughts_that_the_template_shows_are_trained(self, templates):
        template = templates("qwen3")
        (row,) = template.encode([*TALK[:3], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nGood."}])
        assert runs(template, row) == ["Fine.<|im_end|>", "<think>\nHm.\n</think>\n\nGood.<|im_end|>"]

    def test_thoughts_in_a_field_of_their_own_are_trained(self, templates):
        template = templates("qwen3")
        (row,) = template.encode([TALK[0], {"role": "assistant", "reasoning_content": "Hm.", "content": "Good."}])
        assert runs(template, row) == ["<think>\nHm.\n</think>\n\nGood.<|im_end|>"]

    @pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
    def test_earlier_thoughts_that_the_template_drops_are_not_there(self, templates, name):
        template = templates(name)
        (row,) = template.encode([TALK[0], {"role": "assistant", "content": "<think>\nHm.\n</think>Good."}, *TALK[2:]])
        assert "Hm." not in template.decode(row.tokens)
        assert runs(template, row) == expected_runs(FORMATS[name], ["Good.", "Fine."])

    def test_a_thought_stays_a_token(self, templates):
        template = templates("chatml")
        (row,) = template.encode([TALK[0], {"role": "assistant", "content": "<think>Hm.</think>Good. <|im_start|>"}])
        ids = template.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        assert all(one in row.tokens for one in ids)


class TestToolCalls:
    def test_text_before_a_call_is_trained_with_it(self, templates):
        template = templates("qwen2_5")
        talk = [TOOL_TALK[0], {**TOOL_TALK[1], "content": "Let me see."}, *TOOL_TALK[2:]]
        (row,) = template.encode(talk, TOOLS)
        assert runs(template, row) == [f"Let me see.\n{HERMES_CALL}<|im_end|>", "It is sunny.<|im_end|>"]

    def test_two_calls_in_one_reply(self, templates):
        template = templates("qwen3")
        other = {"function": {"name": "get_time", "arguments": "{}"}}
        (row,) = template.encode([TOOL_TALK[0], {"role": "assistant", "tool_calls": [CALL, other]}], TOOLS)
        (trained,) = runs(template, row)
        assert trained.count("<tool_call>") == 2 and trained.endswith("</tool_call><|im_end|>")

    def test_calls_as_text_where_the_template_wants_text(self, tmp_path):
        jinja = (
            (TEMPLATES / "deepseek_v3.jinja")
            .read_text(encoding="utf-8")
            .replace("(call['function']['arguments'] | tojson)", "call['function']['arguments']")
        )
        form = FORMATS["deepseek_v3"]
        template = ChatTemplate.load(
            save_tokenizer(tmp_path, special=form.special, bos=form.bos, eos=form.eos, template=jinja)
        )
        (row,) = template.encode(TOOL_TALK, TOOLS)
        assert marked(template, row) == form.tool_talk

    def test_a_template_for_tools_beside_the_default(self, tmp_path):
        folder = save_tokenizer(tmp_path, special=IM, template=(TEMPLATES / "chatml.jinja").read_text())
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text((TEMPLATES / "qwen2_5.jinja").read_text())
        template = ChatTemplate.load(folder)
        assert "# Functions" in template.decode(template.encode(TOOL_TALK, TOOLS)[0].tokens)
        assert "# Functions" not in template.decode(template.encode(TALK)[0].tokens)

    def test_calls_that_the_template_does_not_print(self, templates):
        with pytest.raises(RowError, match="message 2 has tool calls, which the chat template does not print"):
            templates("phi3").encode(TOOL_TALK)

    def test_a_reply_of_calls_alone_is_not_printed_as_none(self, tmp_path):
        jinja = (TEMPLATES / "glm4.jinja").read_text(encoding="utf-8")
        jinja = jinja.replace(
            "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}", "{{- '\\n' }}{{- message.content }}"
        )
        template = ChatTemplate.load(save_tokenizer(tmp_path, special=FORMATS["glm4"].special, template=jinja))
        (row,) = template.encode(TOOL_TALK, TOOLS)
        assert runs(template, row)[0].startswith("get_weather")

    def test_special_tokens_in_arguments_and_results_are_plain_text(self, templates):
        template = templates("channels")
        call = {"function": {"name": "get_weather", "arguments": {"city": "<|call|>"}}}
        talk = [
            TOOL_TALK[0],
            {"role": "assistant", "tool_calls": [call]},
            {**TOOL_TALK[2], "content": "<|return|>"},
            TOOL_TALK[3],
        ]
        (row,) = template.encode(talk, TOOLS)
        assert runs(template, row)[0] == ' to=get_weather<|channel|>call<|message|>{"city": "<|call|>"}<|call|>'
        ids = template.tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
        assert [row.tokens.count(one) for one in ids] == [1, 1]

    def test_a_call_in_an_earlier_turn(self, templates):
        for name, calls in (("mistral_v3", "[TOOL_CALLS]"), ("qwen2_5", "<tool_call>"), ("llama3_1", '{"name"')):
            template = templates(name)
            (row,) = template.encode([*TOOL_TALK, *TALK[:2]], TOOLS)
            form = FORMATS[name]
            found = runs(template, row)
            assert found[0].startswith(calls) and "sunny" not in found[0]
            assert found[1:] == [form.lead + reply + form.ending(True) for reply in ("It is sunny.", "Fine.")]


class TestSpecialTokensInMessages:
    WORDS = ("<|action|> look", "<think>so</think> yes", "[TOOL_CALLS] [1]", "<unused7>")

    @pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3", "mistral_v3"])
    def test_tokens_that_mark_no_turn_are_those_of_transformers(self, tmp_path, name):
        form = FORMATS[name]
        special = dict.fromkeys((*form.special, "<|action|>", "[TOOL_CALLS]", "<unused7>"))
        folder = save_tokenizer(
            tmp_path, special=tuple(special), plain=("<think>", "</think>"), bos=form.bos, eos=form.eos,
            template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), ends=form.ends or None,
        )  # fmt: skip
        template = ChatTemplate.load(folder)
        talk = questions(self.WORDS)
        expected = template.tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
        assert template.encode(talk)[-1].tokens == expected
        ids = template.tokenizer.convert_tokens_to_ids(["<|action|>", "<think>", "[TOOL_CALLS]", "<unused7>"])
        assert set(ids) <= set(expected)

    def test_beside_letters_of_a_token_that_marks_turns_they_stay_tokens(self, tmp_path):
        template = ChatTemplate.load(save_tokenizer(tmp_path, special=(*IM, "<|action|>")), template="chatml")
        (row,) = template.encode(questions(["<|im_end|> <|action|>"]))
        action, end = template.tokenizer.convert_tokens_to_ids(["<|action|>", "<|im_end|>"])
        assert row.tokens.count(action) == 1 and row.tokens.count(end) == 2
        assert runs(template, row) == ["<|im_end|> <|action|><|im_end|>"]


class TestGenerationTags:
    def test_a_header_inside_the_tags_is_context(self, tmp_path):
        jinja = (TEMPLATES / "channels.jinja").read_text()
        for start in ("'<|start|>assistant to='", "'<|start|>assistant<|channel|>final<|message|>'"):
            jinja = jinja.replace("{{- " + start, "{%- generation %}{{- " + start)
        for end in ("call", "return", "end"):
            jinja = jinja.replace(
                f"'<|{end}|>' }}}}\n        {{%- el", f"'<|{end}|>' }}}}{{%- endgeneration %}}\n        {{%- el"
            )
        jinja = jinja.replace("'<|end|>' }}\n        {%- endif", "'<|end|>' }}{%- endgeneration %}\n        {%- endif")
        form = FORMATS["channels"]
        template = ChatTemplate.load(save_tokenizer(tmp_path, special=form.special, eos=form.eos, template=jinja))
        assert template.method == "generation tag"
        assert marked(template, template.encode(TALK)[0]) == form.talk

    def test_tags_in_the_wrong_place_are_not_used(self, tmp_path):
        jinja = "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ '<|' + m.role + '|>' + x + eos_token }}{% endfor %}"
        template = ChatTemplate.load(save_tokenizer(tmp_path, special=ROLES, template=jinja))
        assert template.method == "sentinel"
        assert runs(template, template.encode(TALK)[0]) == ["Fine.</s>", "Fine.</s>"]


class TestOneRowPerReply:
    @pytest.fixture
    def template(self, tmp_path):
        jinja = (TEMPLATES / "replies_twice.jinja").read_text()
        return ChatTemplate.load(save_tokenizer(tmp_path, special=ROLES, template=jinja))

    def test_every_reply_is_the_end_of_a_row(self, template):
        rows = template.encode(TALK)
        assert template.method == "one row per reply"
        assert [marked(template, row) for row in rows] == [
            "<|system|>so far: \n<|user|>Hi.</s><|assistant|>«Fine.</s>»",
            "<|system|>so far: Fine.;\n<|user|>Hi.</s><|assistant|>Fine.</s><|user|>Fine.</s><|assistant|>«Fine.</s>»",
        ]

    def test_the_prompt_has_the_tokens_it_has_in_chat(self, template):
        rows = template.encode(TALK)
        prompt = template.prompt(TALK[:3])
        assert rows[1].tokens[: len(prompt)] == prompt

    def test_text_like_special_tokens(self, template):
        (row,) = template.encode(questions(["Write </s> <|user|>!"]))
        assert runs(template, row) == ["Write </s> <|user|>!</s>"]
        assert row.tokens.count(template.eos_id) == 2


class TestBuiltIn:
    def test_chatml_with_tokens_for_turns(self, tmp_path):
        template = ChatTemplate.load(save_tokenizer(tmp_path, special=IM), template="chatml")
        assert marked(template, template.encode(TALK)[0]) == im(CHATML)
        assert template.method == "generation tag"

    def test_chatml_without_them_ends_turns_with_eos(self, tmp_path):
        template = ChatTemplate.load(save_tokenizer(tmp_path), template="chatml")
        assert marked(template, template.encode(TALK)[0]) == CHATML.replace("‹", "<|im_start|>").replace("›", "</s>")

    def test_chatml_with_tools(self, tmp_path):
        template = ChatTemplate.load(save_tokenizer(tmp_path, special=IM), template="chatml")
        (row,) = template.encode(TOOL_TALK, TOOLS)
        assert runs(template, row) == [f"{HERMES_CALL}<|im_end|>", "It is sunny.<|im_end|>"]

    def test_plain_words_for_base_models(self, tmp_path):
        template = ChatTemplate.load(save_tokenizer(tmp_path, bos="<s>"), template="plain")
        expected = "<s>Be kind.\n\nUser:\nHi.\n\nAssistant:\n«Fine.</s>»\n\n"
        assert marked(template, template.encode(SYSTEM_TALK)[0]) == expected
        assert template.decode(template.prompt(SYSTEM_TALK[:2])) == expected.partition("«")[0]

    def test_a_file(self, tmp_path):
        folder = save_tokenizer(tmp_path, special=IM)
        template = ChatTemplate.load(folder, template=TEMPLATES / "chatml.jinja")
        assert marked(template, template.encode(TALK)[0]) == im(CHATML)

    def test_is_kept_by_save_pretrained(self, tmp_path):
        template = ChatTemplate.load(save_tokenizer(tmp_path / "a", special=IM), template="chatml")
        template.tokenizer.save_pretrained(tmp_path / "b")
        again = ChatTemplate.load(tmp_path / "b")
        assert again.jinja == template.jinja and again.encode(TALK) == template.encode(TALK)

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(BadModel, match="chat_template='chatlm' cannot be read .*Try: chatml or plain"):
            ChatTemplate.load(save_tokenizer(tmp_path), template="chatlm")


class TestEnds:
    def test_words_that_end_a_turn_are_trained_and_eos_follows(self, tmp_path):
        jinja = "{% for m in messages %}{{ '# ' + m.role + '\\n' + m.content + '\\n# end\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}"
        template = ChatTemplate.load(save_tokenizer(tmp_path, template=jinja))
        assert marked(template, template.encode(TALK)[0]) == (
            "# user\nHi.\n# end\n# assistant\n«Fine.\n# end»\n# user\nFine.\n# end\n# assistant\n«Fine.\n# end</s>»"
        )

    def test_no_eos_after_a_conversation_that_ends_with_a_question(self, templates):
        template = templates("alpaca")
        (row,) = template.encode(TALK[:3])
        assert runs(template, row) == ["Fine."] and template.eos_id not in row.tokens

    def test_a_template_without_generation_prompt_gets_one(self, tmp_path):
        jinja = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}{% endfor %}"
        template = ChatTemplate.load(save_tokenizer(tmp_path, special=ROLES, template=jinja))
        assert runs(template, template.encode(TALK)[0]) == ["Fine.</s>", "Fine.</s>"]
        assert template.decode(template.prompt(TALK[:1])) == "<|user|>\nHi.</s><|assistant|>\n"

    def test_a_token_that_swallows_blanks_does_not_swallow_the_mark(self, tmp_path):
        folder = save_tokenizer(
            tmp_path, special=("<|end|>", *ROLES), eos="<|endoftext|>", template=(TEMPLATES / "phi3.jinja").read_text()
        )
        content = json.loads((folder / "tokenizer.json").read_text())
        for token in content["added_tokens"]:
            token["rstrip"] = token["content"] in ROLES
        (folder / "tokenizer.json").write_text(json.dumps(content))
        template = ChatTemplate.load(folder)
        (row,) = template.encode(questions(["  Yes."]))
        assert runs(template, row) == ["Yes.<|end|>"]


class TestTokenizer:
    def test_bos_is_not_doubled(self, templates):
        template = templates("llama3")
        ids = template.tokenizer("Hi.")["input_ids"]
        assert ids[0] == template.tokenizer.bos_token_id  # the tokenizer would add one
        for tokens in (template.encode(TALK)[0].tokens, template.prompt(TALK[:1])):
            assert tokens.count(template.tokenizer.bos_token_id) == 1

    def test_pad_falls_back_to_eos(self, tmp_path):
        jinja = (TEMPLATES / "chatml.jinja").read_text()
        assert (without := ChatTemplate.load(save_tokenizer(tmp_path / "a", template=jinja))).pad_id == without.eos_id
        own = ChatTemplate.load(save_tokenizer(tmp_path / "b", pad="<pad>", template=jinja))
        assert own.pad_id == own.tokenizer.convert_tokens_to_ids("<pad>") != own.eos_id

    def test_a_vocabulary_larger_than_the_embedding(self, templates):
        template = templates("chatml")
        check_vocabulary(template, template.vocab_size)
        with pytest.raises(BadModel, match=f"has {template.vocab_size} tokens and the model's embedding 100 rows"):
            check_vocabulary(template, 100)

    def test_the_fingerprint_follows_the_template_and_the_tokenizer(self, tmp_path):
        def fingerprint(name, **changes):
            return ChatTemplate.load(save_tokenizer(tmp_path / name, **changes)).fingerprint

        jinja = (TEMPLATES / "chatml.jinja").read_text()
        first = fingerprint("a", template=jinja)
        assert first == fingerprint("b", template=jinja)
        assert len({first, fingerprint("c", template=jinja + " "), fingerprint("d", template=jinja, special=IM)}) == 3

    def test_several_threads_at_once(self, templates):
        template = templates("generation_tags")
        rows = [(questions([f"Reply {number}.", "Yes."]), None) for number in range(50)]
        expected, results = template.encode_batch(rows), [None] * 4

        def work(number):
            results[number] = template.encode_batch(rows)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 4


class TestBadModels:
    def test_no_template(self, tmp_path):
        with pytest.raises(BadModel, match="has no chat template. Try: chat_template='chatml'"):
            ChatTemplate.load(save_tokenizer(tmp_path))

    def test_no_eos(self, tmp_path):
        with pytest.raises(BadModel, match="has no eos_token"):
            ChatTemplate.load(save_tokenizer(tmp_path, eos=None, template="{{ messages[0].content }}"))

    def test_not_jinja(self, tmp_path):
        with pytest.raises(BadModel, match="is not valid Jinja .line 1: .*Try:"):
            ChatTemplate.load(save_tokenizer(tmp_path, template="{% for m in %}"))

    def test_a_template_that_always_fails(self, tmp_path):
        with pytest.raises(BadModel, match="fails on a question and its answer: .*never"):
            ChatTemplate.load(save_tokenizer(tmp_path, template="{{ raise_exception('never') }}"))

    def test_a_template_without_replies(self, tmp_path):
        jinja = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        with pytest.raises(BadModel, match="does not print the replies"):
            ChatTemplate.load(save_tokenizer(tmp_path, template=jinja))

    def test_no_tokenizer(self, tmp_path):
        with pytest.raises(BadModel, match="has no tokenizer that transformers can read"):
            ChatTemplate.load(tmp_path)

    def test_a_damaged_tokenizer(self, tmp_path):
        folder = save_tokenizer(tmp_path, template="{{ messages[0].content }}")
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(BadModel, match="has no tokenizer that transformers can read"):
            ChatTemplate.load(folder)


class TestBadRows:
    @pytest.mark.parametrize(
        ("messages", "problem"),
        [
            ([], "the conversation has no messages"),
            ("Hi.", "the conversation has no messages"),
            (TALK[:1], "no message has the role assistant, so there is nothing to train on"),
            (["Hi."], "message 1 is not an object with a role and a content"),
            ([{"content": "Hi."}], "message 1 is not an object with a role"),
            ([*TALK[:1], {"role": "assistant", "content": 7}], "the content of message 2 is not a text .int"),
            ([*TALK[:1], {"role": "assistant", "content": " \n"}], "the reply in message 2 is empty"),
            ([*TALK[:1], {"role": "assistant", "content": None}], "the reply in message 2 is empty"),
            ([*TALK[:1], {"role": "assistant"}], "the reply in message 2 is empty"),
            ([TOOL_TALK[2], *TALK[:2]], "message 1 is the result of a tool before any reply"),
            ([{"role": "user", "content": [{"type": "image"}]}, TALK[1]], "message 1 has a part that is not text .image"),
            ([*TALK[:1], {"role": "assistant", "tool_calls": [7]}], "message 2 has a tool call without the name"),
            ([*TALK[:1], {"role": "assistant", "tool_calls": {"a": 1}}], "the tool calls of message 2 are not a list"),
        ],
    )  # fmt: skip
    def test_rows_that_no_template_accepts(self, templates, messages, problem):
        with pytest.raises(RowError, match=problem):
            templates("chatml").encode(messages)

    @pytest.mark.parametrize(
        ("name", "roles"),
        [
            ("gemma2", "user, user, assistant"),
            ("mistral_v1", "user, user, assistant"),
            ("llama2", "assistant, user, assistant"),
        ],
    )
    def test_roles_out_of_order(self, templates, name, roles):
        talk = [{"role": role, "content": "Hm."} for role in roles.split(", ")]
        with pytest.raises(RowError, match=f"the chat template refuses the roles {roles} .Roles "):
            templates(name).encode(talk)

    def test_a_template_that_crashes_on_a_row(self, tmp_path):
        jinja = (
            "{% for m in messages %}{{ m.role + m.content + (m.name + 1 if m.name else '') + eos_token }}{% endfor %}"
        )
        template = ChatTemplate.load(save_tokenizer(tmp_path, template=jinja))
        with pytest.raises(RowError, match="the chat template fails on the roles user, assistant .TypeError"):
            template.encode([{**TALK[0], "name": "Ann"}, TALK[1]])

    def test_replies_that_the_template_leaves_out(self, tmp_path):
        jinja = (
            "{% for m in messages %}{{ m.role }}{% if not m.name %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
        )
        template = ChatTemplate.load(save_tokenizer(tmp_path, template=jinja))
        with pytest.raises(RowError, match="prints none of the replies, so there is nothing to train on"):
            template.encode([TALK[0], {**TALK[1], "name": "Ann"}])

    def test_one_bad_row_does_not_spoil_the_others(self, templates):
        good, bad, last = templates("chatml").encode_batch([(TALK, None), ([], None), (TALK, None)])
        assert isinstance(bad, RowError) and good == last and len(good) == 1

    def test_is_a_user_error(self):
        assert issubclass(RowError, BadData)


class TestParts:
    def test_a_content_in_parts_is_joined(self, templates):
        parts = [{"type": "text", "text": "Fi"}, {"type": "text", "text": "ne."}]
        for name in ("chatml", "parts_only"):
            template = templates(name)
            assert template.encode([TALK[0], {"role": "assistant", "content": parts}]) == template.encode(TALK[:2])

    def test_fields_that_are_null_count_as_missing(self, templates):
        template = templates("llama3_1")
        nulls = {"tool_calls": None, "name": None, "tool_call_id": None}
        assert template.encode([{**one, **nulls} for one in TALK]) == template.encode(TALK)
        assert template.encode([{**one, "tool_calls": []} for one in TALK]) == template.encode(TALK)


def test_a_preview_shows_what_is_trained(templates):
    shown = preview(templates("chatml"), [(TALK[:2], None), (SYSTEM_TALK, None), (TALK, None), (TALK, None)], n=2)
    assert len(shown) == 2
    assert shown[0] == [
        ("<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n", False), ("Fine.<|im_end|>", True), ("\n", False),
    ]  # fmt: skip


def test_consecutive_replies_are_both_trained(templates):
    talk = [TALK[0], {"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]
    template = templates("chatml")
    assert runs(template, template.encode(talk)[0]) == ["One.<|im_end|>", "Two.<|im_end|>"]
