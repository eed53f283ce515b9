"""From a file of rows to trained weights, by the commands a user types."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from brimful.cli.app import main
from brimful.data.loader import Loader
from brimful.data.store import Store
from brimful.errors import BadData
from brimful.memory.layout import PADDED
from brimful.step.stepper import Stepper
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions


def rows(count):
    draw = random.Random(0)
    words = ["".join(chr(draw.randrange(0x4E00, 0x4F00)) for _ in range(2)) for _ in range(300)]
    for number in range(count):
        text = "，".join(draw.choices(words, k=draw.randrange(2, 30)))
        yield {"question": f"第{number}题：{text[:20]}？", "answer": f"{text}。 The answer is {number}."}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store of 125 rows, and the folder it was made in."""
    folder = tmp_path_factory.mktemp("whole")
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(130)]
    (folder / "raw.jsonl").write_text("\n".join([*lines, lines[3], json.dumps({"question": "空", "answer": " "})]))
    for command in (
        f"data check {folder}/raw.jsonl --json",
        f"data clean {folder}/raw.jsonl --output {folder}/clean --no-near --valid 5 --json",
        f"data tokenizer {folder}/clean/train.parquet --output {folder}/tokenizer --vocab-size 900 --model chatlm-tiny --json",
        f"data tokenize {folder}/clean/train.parquet --tokenizer {folder}/tokenizer --output {folder}/store --max-tokens 24 --host-limit 4GiB --json",
    ):
        main(command.split())
    return folder


def test_every_row_is_accounted_for(made):
    report = json.loads((made / "clean/clean.json").read_text())
    assert (report["rows_in"], report["rows_out"]) == (132, 130)
    assert report["dropped"] == {**dict.fromkeys(report["dropped"], 0), "empty": 1, "duplicate": 1}
    assert len(Store.open(made / "store")) == 125


def test_a_stored_row_reads_as_it_was_written(made):
    from transformers import AutoTokenizer

    tokenizer, store = AutoTokenizer.from_pretrained(made / "store/tokenizer"), Store.open(made / "store")
    texts = {tokenizer.decode(store[index]["prompt"].tolist(), skip_special_tokens=True) for index in range(125)}
    assert texts < {row["question"].replace("：", ":").replace("？", "?").replace("，", ",") for row in rows(130)}


PLAN = SimpleNamespace(
    split=lambda shapes: [list(range(0, 12, 2)), list(range(1, 12, 2))], row_layout=PADDED, global_batch=12, host=None
)
"""As much of a plan as a loader needs."""


def test_a_loaded_step_has_the_gradient_of_the_plain_batch(made):
    task = Sft(options=SftOptions(model="chatlm-tiny"))
    store = task.rows(str(made / "store"))
    step = next(iter(Loader(store, task, PLAN)))
    assert len(step) == 12 and len(step.groups) == 2

    def gradients(rows):
        torch.manual_seed(0)
        model = task.model().double().eval()
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), task).backward(rows)
        return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])

    ahead, plain = gradients(step), gradients([store[int(index)] for index in step.indices])
    assert torch.linalg.vector_norm(ahead - plain) / torch.linalg.vector_norm(plain) < 1e-6


def test_a_batch_is_padded_and_masked(made):
    store = Store.open(made / "store")
    few = [store[0], store[1], store[2]]
    batch = Pretrain(LanguageOptions(model="chatlm-tiny")).collate(few)
    for place, row in enumerate(few):
        source, target = len(row["prompt"]), len(row["response"])
        assert batch["input_ids"][place, :source].tolist() == row["prompt"].tolist()
        assert batch["attention_mask"][place].tolist() == [1] * source + [0] * (batch["input_ids"].shape[1] - source)
        assert batch["labels"][place, :target].tolist() == row["response"].tolist()
        assert set(batch["labels"][place, target:].tolist()) <= {-100}
        assert row["prompt"][-1] == row["response"][-1] == 1


def test_workers_hand_over_the_same_batches_as_reading_here(made):
    store, task = Store.open(made / "store"), Pretrain(LanguageOptions(model="chatlm-tiny"))
    steps = []
    for workers in (0, 1):
        loader = Loader(store, task, PLAN, workers=workers)
        steps.append([step for step, _ in zip(loader, range(3), strict=False)])
        loader.close()
    for here, there in zip(*steps, strict=True):
        assert here.collated and there.collated
        assert all(
            torch.equal(one[key], other[key]) for one, other in zip(here.parts, there.parts, strict=True) for key in one
        )


def test_a_store_for_another_model_is_refused_with_the_reason(made, tmp_path, monkeypatch):
    from dataclasses import replace

    from brimful.tasks import language as module

    presets = {**module.PRESETS, "chatlm-tiny": replace(module.PRESETS["chatlm-tiny"], vocab=500)}
    monkeypatch.setattr(module, "PRESETS", presets)
    with pytest.raises(BadData, match="its tokenizer has 900 tokens and the model 500"):
        Pretrain(LanguageOptions(model="chatlm-tiny")).rows(str(made / "store"))


def test_raw_files_must_be_tokenized_first(made):
    with pytest.raises(BadData, match="not a token store. Try: `brimful data tokenize`"):
        Pretrain(LanguageOptions(model="chatlm-tiny")).rows(str(made / "raw.jsonl"))


def test_the_guides_loop_trains_one_pass(made, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs/data.md").read_text()
    (loop,) = [code for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "Loader(" in code]
    monkeypatch.chdir(made)
    names = {}
    exec(loop, names)
    assert names["loader"].passes >= 1 > (names["loader"].samples - 64) / 125
    assert names["result"].rows == 64 and names["stepper"].steps == 2
