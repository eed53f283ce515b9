"""Rows and models that cannot be trained on: one message with the row or the file, before anything is trained."""

import json
import shutil

import pytest

import brimful
from brimful.errors import UserError
from brimful.tasks.load import load_task
from brimful.training.events import read_events
from tests.tasks.tiny import write_jsonl
from tests.tasks.tiny_causal import talk

GOOD = [{"messages": talk(f"{name}的花？", "红色。")} for name in "甲乙丙丁"]
PAIRS = [{"prompt": f"{name}的花？", "chosen": "红色。", "rejected": "白色。"} for name in "甲乙丙丁"]
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}[EOS]{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ m['role'] }}: {{ m['content'] }}[EOS]{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def refusal(task, options, rows, folder):
    """The message, and nothing was trained."""
    data = write_jsonl(folder / "rows.jsonl", rows)
    with pytest.raises(UserError) as error:
        brimful.train(
            load_task(task, options), str(data), run=folder / "run", max_steps=2, global_batch=4, device="cpu", workers=0, cache=False,
            quiet=True, memory_limit="1GiB",
        )  # fmt: skip
    events = folder / "run" / "events.jsonl"
    assert not events.is_file() or "step" not in {event["event"] for event in read_events(events)}
    assert "\n" not in str(error.value) and "Try: " in str(error.value)
    return str(error.value)


def changed(causal, folder, **files):
    """A copy of the model with other contents of some files; None removes one."""
    copy = shutil.copytree(causal.model, folder / "model")
    for name, content in files.items():
        path = copy / name.replace("__", ".")
        path.unlink(missing_ok=True) if content is None else path.write_text(content, encoding="utf-8")
    return str(copy)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": talk("甲？", "")}, "line 5: the reply in message 2 is empty"),
        ({"messages": [*talk("甲？"), {"role": "critic", "content": "x"}]}, "line 5: message 2 of 'messages': unknown role"),
        ({"messages": "甲"}, "line 5: "),
        ({"text": "甲"}, "line 5: no field 'messages'"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_is_named(causal, tmp_path, row, message):
    assert message in refusal("sft", {"model": str(causal.model)}, [*GOOD, row], tmp_path)


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (REFUSES_SYSTEM, {"messages": talk("甲？", "红。", system="短。")}, "the roles system, user, assistant (no system role)"),
        (ALTERNATES, {"messages": talk("甲？", "红。")[::-1]}, "the roles assistant, user (roles must alternate)"),
    ],
)  # fmt: skip
def test_roles_that_the_template_refuses_are_named_with_the_row(causal, tmp_path, template, row, reason):
    model = changed(causal, tmp_path, chat_template__jinja=template)
    message = refusal("sft", {"model": model}, [*GOOD, row], tmp_path)
    assert "rows.jsonl, line 5: the chat template refuses" in message and reason in message


def test_where_all_rows_are_too_long_the_first_is_named(causal, tmp_path):
    rows = [{"messages": talk("红" * 200, "红。")}] * 3
    message = refusal("sft", {"model": str(causal.model), "max_tokens": 32}, rows, tmp_path)
    assert "no row is left of 3" in message and "line 1: its first reply begins after max_tokens=32" in message


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_model_folder_that_lacks_something_is_named(causal, tmp_path, task):
    rows = GOOD if task == "sft" else PAIRS
    config = json.loads((causal.model / "tokenizer_config.json").read_text())
    without_template = {"chat_template__jinja": None, "tokenizer_config__json": json.dumps({k: v for k, v in config.items() if k != "chat_template"})}  # fmt: skip
    without_eos = {"tokenizer_config__json": json.dumps({k: v for k, v in config.items() if k != "eos_token"}), "special_tokens_map__json": None}  # fmt: skip
    for number, (files, reason) in enumerate(
        [(without_template, "has no chat template"), (without_eos, "names no eos_token")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = changed(causal, folder, **files)
        message = refusal(task, {"model": model}, rows, folder)
        assert reason in message and model in message


def test_an_adapter_of_another_base_is_not_trained_further(causal, tmp_path):
    pytest.importorskip("peft")
    base = shutil.copytree(causal.model, tmp_path / "base")
    data = write_jsonl(tmp_path / "first.jsonl", GOOD)
    brimful.train(
        load_task("sft", {"model": str(base), "lora": "r=2"}), str(data), run=tmp_path / "lora", max_steps=1, global_batch=4, device="cpu",
        workers=0, cache=False, quiet=True, memory_limit="1GiB",
    )  # fmt: skip
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (base / "model.safetensors").write_bytes(content)
    for task in ("sft", "dpo"):
        with pytest.raises(UserError, match="is an adapter of another base: the weights in .*base are not those"):
            load_task(task, {"model": str(tmp_path / "lora")})


def test_pairs_without_anything_to_learn_are_named(causal, tmp_path):
    rows = [{**row, "rejected": row["chosen"]} for row in PAIRS]
    message = refusal("dpo", {"model": str(causal.model)}, rows, tmp_path)
    assert "4 with equal replies" in message and "line 1: chosen is equal to rejected" in message


def test_pairs_that_are_too_long_are_named(causal, tmp_path):
    rows = [{"prompt": "甲？", "chosen": "红" * 200, "rejected": "红" * 201}]
    message = refusal("dpo", {"model": str(causal.model), "max_tokens": 32}, rows, tmp_path)
    assert "1 too long" in message and "rows.jsonl, line 1: of " in message
