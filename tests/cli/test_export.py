"""`brimful export` as a user types it: a run of an adapter, a whole model, and what is refused."""

import json

import pytest
import torch

from brimful.tasks import adapters
from brimful.tasks.adapters import Lora, load_base, with_adapter
from brimful.tasks.export import stored_tensors
from tests.cli.test_cli import run
from tests.tasks.adapted import add_noise, logits, make_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "qwen", std=0.02)


@pytest.fixture(scope="module")
def adapter_run(base, tmp_path_factory):
    """A folder with RUN/model, as `brimful train --lora` leaves it, and the logits of its model."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder / "model").mkdir(parents=True)
    model = add_noise(with_adapter(load_base(base), Lora(r=4)))
    adapters.save(model, folder / "model")
    return folder, logits(model)


def test_a_run_is_merged_into_a_folder_that_transformers_loads(adapter_run, base, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    output = tmp_path / "merged"
    code, out, _ = run(
        "export", str(adapter_run[0]), "--output", str(output), "--merge", "--dtype", "fp32", "--json", capsys=capsys
    )
    facts = json.loads(out)
    assert code == 0 and (facts["kind"], facts["base"], facts["dtypes"]) == ("merged", str(base), ["F32"])
    found = logits(AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32))
    assert (found - adapter_run[1]).abs().max() < 1e-6 * adapter_run[1].abs().max()


def test_without_merge_the_adapter_is_copied(adapter_run, tmp_path, capsys):
    code, out, _ = run("export", str(adapter_run[0]), "--output", str(tmp_path / "adapter"), capsys=capsys)
    assert code == 0 and out.startswith(f"Saved to {tmp_path / 'adapter'} (")
    for name in ("adapter_config.json", "adapter_model.safetensors", "brimful_base.json"):
        assert (tmp_path / "adapter" / name).read_bytes() == (adapter_run[0] / "model" / name).read_bytes()


@pytest.mark.parametrize(("flags", "dtype"), [([], "F32"), (["--dtype", "bf16"], "BF16"), (["--dtype", "fp16"], "F16")])
def test_a_whole_model_is_written_in_the_dtype_asked_for(base, tmp_path, capsys, flags, dtype):
    code, _, _ = run("export", str(base), "--output", str(tmp_path / "out"), *flags, capsys=capsys)
    assert code == 0 and {one.dtype for one in stored_tensors(tmp_path / "out").values()} == {dtype}


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("base", ["--merge"], "--merge is for adapters"),
        ("base", ["--base", "elsewhere"], "--base elsewhere is for adapters"),
        ("adapter", ["--dtype", "bf16"], "--dtype bf16 needs --merge"),
        ("adapter", ["--merge", "--base", "nowhere"], "nowhere"),
        ("nothing", [], "nothing"),
    ],
)
def test_what_cannot_work_is_one_message(adapter_run, base, tmp_path, capsys, model, flags, message):
    source = {"base": base, "adapter": adapter_run[0], "nothing": tmp_path / "nothing"}[model]
    code, out, err = run("export", str(source), "--output", str(tmp_path / "out"), *flags, capsys=capsys)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(adapter_run, tmp_path, capsys):
    other = make_base(tmp_path / "other", seed=1)
    flags = ["--merge", "--base", str(other), "--output", str(tmp_path / "out")]
    code, _, err = run("export", str(adapter_run[0]), *flags, capsys=capsys)
    assert code == 2 and "is an adapter of another base" in err and not (tmp_path / "out").exists()


def test_an_existing_output_is_refused_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "out" / "mine").mkdir(parents=True)
    code, _, err = run("export", "nothing", "--output", str(tmp_path / "out"), capsys=capsys)
    assert code == 2 and "exists already" in err
