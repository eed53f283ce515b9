"""Weights written in pieces: the same file to the byte, through whatever library saves the model."""

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from safetensors.torch import load_file
from torch import nn

from brimful.task import Task
from brimful.training import state
from brimful.training import state as streamed
from brimful.training.options import Chosen
from tests.tasks.tiny import make_model
from tests.training.test_state import position

MIXED = {
    "b.weight": torch.arange(12.0).reshape(3, 4),
    "a.weight": torch.arange(5.0),
    "half": torch.arange(7.0).bfloat16(),
    "count": torch.tensor(3),
    "mask": torch.tensor([True, False, True]),
    "字": torch.arange(6, dtype=torch.float64),
    "nothing": torch.empty(0, 4),
    "small": torch.arange(3, dtype=torch.int8),
}


def both(folder, tensors, **how):
    """What is written here, and what safetensors writes."""
    streamed.save_file(tensors, folder / "ours", **how)
    safetensors.torch.save_file(tensors, folder / "theirs", **how)
    return (folder / "ours").read_bytes(), (folder / "theirs").read_bytes()


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_file_is_that_of_safetensors_to_the_byte(tmp_path, metadata):
    ours, theirs = both(tmp_path, MIXED, metadata=metadata)
    assert ours == theirs


@pytest.mark.parametrize("dtype", streamed.NAMES, ids=str)
def test_every_type_has_its_name_and_its_place(tmp_path, dtype):
    others = {f"other {number}": torch.ones(3).to(one) for number, one in enumerate(streamed.NAMES)}
    ours, theirs = both(tmp_path, {"one": torch.ones(2, 3).to(dtype), **others})
    assert ours == theirs


def test_a_tensor_larger_than_a_piece_is_whole_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(streamed, "PIECE_BYTES", 16)
    ours, theirs = both(tmp_path, MIXED)
    assert ours == theirs


def test_a_type_without_a_name_here_is_left_to_safetensors(tmp_path):
    streamed.save_file({"wide": torch.ones(2, dtype=torch.complex64)}, tmp_path / "file")
    assert load_file(tmp_path / "file")["wide"].dtype == torch.complex64


def test_tensors_that_share_memory_are_refused_as_by_safetensors(tmp_path):
    one = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        streamed.save_file({"one": one, "two": one}, tmp_path / "file")


def test_a_tensor_out_of_order_is_refused_as_by_safetensors(tmp_path):
    with pytest.raises(ValueError, match="non contiguous"):
        streamed.save_file({"one": torch.ones(3, 4).T}, tmp_path / "file")


@pytest.fixture
def written(monkeypatch):
    """Names of the files that were written in pieces."""
    names, write = [], streamed._write
    monkeypatch.setattr(streamed, "_write", lambda file, tensor: (names.append(file.name), write(file, tensor)))
    return names


@pytest.mark.parametrize("make", [make_model, lambda: nn.Linear(3, 3)], ids=["transformers", "torch"])
def test_a_checkpoint_writes_its_weights_in_pieces(tmp_path, written, make):
    model = make()
    optimizer = Chosen(name="adamw", lr=1.0, weight_decay=0.0)(model)
    state.write(tmp_path, position(), task=Task(), model=model, optimizer=optimizer, rows=[])
    assert set(written) == {str(tmp_path / state.WEIGHTS)}
    assert len(written) == len(load_file(tmp_path / state.WEIGHTS))


def test_transformers_loads_what_was_written_in_pieces(tmp_path, written):
    model = make_model()
    with streamed.in_pieces():
        model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert written
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_savers_of_the_libraries_are_put_back_after_a_failure():
    now = lambda: {safetensors.torch.save_file, transformers.modeling_utils.safe_save_file}  # noqa: E731
    with pytest.raises(OSError), streamed.in_pieces():
        assert now() == {streamed.save_file}
        raise OSError
    assert streamed.save_file not in now()
