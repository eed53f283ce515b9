"""Features on disk: computed once, complete or absent, resumable, shared among processes."""

import json
import multiprocessing
import re
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from brimful.errors import BadData, BadOption, DoesNotFit
from brimful.molecules.features import compute as compute_module
from brimful.molecules.features.compute import compute_features
from brimful.molecules.features.encoder import Encoded
from tests.molecules import support


def molecules(count, first=0):
    smiles = [f"C{first + at}" for at in range(count)]
    return support.molecules(smiles, rows=np.arange(count) + 10, rows_in=count + 10)


@dataclass
class Toy:
    """The number in the SMILES and its square; keeps the batches that it got."""

    name: str = "toy"
    batch: int = 4
    molecule_bytes: int = 100
    reads_rows: bool = False
    stamp: str = "1"
    dtype: type = np.float32
    bad: tuple[str, ...] = ()
    breaks_at: str = ""
    room: int = 10**9
    """Molecules that fit memory."""
    batches: list = field(default_factory=list)

    def fingerprint(self):
        return self.stamp

    def encode(self, some):
        if self.breaks_at in list(some.smiles):
            raise KeyboardInterrupt
        if len(some) > self.room:
            raise MemoryError
        self.batches.append(list(some.smiles))
        numbers = np.array([int(one[1:]) for one in some.smiles], dtype=self.dtype)
        failed = {at: "it is bad" for at, one in enumerate(some.smiles) if one in self.bad}
        matrix = np.stack([numbers, numbers**2], axis=1)
        if self.dtype is np.float32:
            matrix[list(failed)] = np.inf  # what stands there does not matter
        return Encoded(matrix=matrix, failed=failed, remarks={"were odd": 1})


def test_the_matrix_is_the_encoders_output_memory_mapped(tmp_path):
    features = compute_features(Toy(), molecules(10), cache=tmp_path)
    assert isinstance(features.matrix, np.memmap)
    assert features.matrix.flags.c_contiguous
    assert features.matrix.dtype == np.float32
    np.testing.assert_array_equal(features.matrix[:, 0], np.arange(10))
    assert not features.cached
    assert features.remarks == ("3 molecules were odd",)


def test_features_are_cached(tmp_path):
    compute_features(Toy(), molecules(10), cache=tmp_path)
    again = Toy()
    features = compute_features(again, molecules(10), cache=tmp_path)
    assert features.cached
    assert again.batches == []
    np.testing.assert_array_equal(features.matrix[:, 1], np.arange(10.0) ** 2)


@pytest.mark.parametrize(
    "other", [(Toy(stamp="2"), molecules(6)), (Toy(), molecules(6, first=1)), (Toy(), molecules(5))]
)
def test_another_encoder_or_other_molecules_are_another_entry(tmp_path, other):
    compute_features(Toy(), molecules(6), cache=tmp_path)
    encoder, some = other
    assert not compute_features(encoder, some, cache=tmp_path).cached
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_count_only_for_encoders_that_read_them(tmp_path):
    some = molecules(6)
    moved = support.molecules(some.smiles, rows=some.rows + 1, rows_in=99)
    for reads_rows in (False, True):
        compute_features(Toy(reads_rows=reads_rows), some, cache=tmp_path / str(reads_rows))
        again = compute_features(Toy(reads_rows=reads_rows), moved, cache=tmp_path / str(reads_rows))
        assert again.cached == (not reads_rows)


def test_failed_molecules_are_nan_and_listed(tmp_path):
    phrases = []
    features = compute_features(Toy(bad=("C1", "C5")), molecules(10), cache=tmp_path, progress=phrases.append)
    assert features.failed == {1: "it is bad", 5: "it is bad"}
    assert np.isnan(features.matrix[[1, 5]]).all()
    np.testing.assert_array_equal(features.kept, [0, 2, 3, 4, 6, 7, 8, 9])
    assert np.isfinite(features.matrix[features.kept]).all()
    assert "toy: 2 molecules without features left out: row 11 (C1): it is bad; row 15 (C5): it is bad" in phrases


def test_bytes_stay_bytes_unless_something_failed(tmp_path):
    assert compute_features(Toy(dtype=np.uint8), molecules(9), cache=tmp_path).matrix.dtype == np.uint8
    features = compute_features(Toy(dtype=np.uint8, stamp="2", bad=("C0",)), molecules(9), cache=tmp_path)
    assert features.matrix.dtype == np.float32
    np.testing.assert_array_equal(features.matrix[1:, 0], np.arange(1, 9))


def test_a_batch_without_any_features_takes_the_width_of_the_others(tmp_path):
    class Empty(Toy):
        def encode(self, some):
            encoded = super().encode(some)
            return Encoded(matrix=encoded.matrix[:, :0], failed=encoded.failed) if len(encoded.failed) == 4 else encoded

    features = compute_features(Empty(bad=("C0", "C1", "C2", "C3")), molecules(9), cache=tmp_path)
    assert features.matrix.shape == (9, 2)
    assert list(features.failed) == [0, 1, 2, 3]


def test_no_features_at_all_are_an_error(tmp_path):
    with pytest.raises(BadData, match="toy failed on all 2 molecules of some.csv .it is bad"):
        compute_features(Toy(bad=("C0", "C1")), molecules(2), cache=tmp_path)
    with pytest.raises(BadData, match="some.csv has no molecules"):
        compute_features(Toy(), molecules(0), cache=tmp_path)


def test_an_interrupted_computation_continues_after_its_last_batch(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        compute_features(Toy(breaks_at="C9"), molecules(12), cache=tmp_path)
    again = Toy(batch=3)  # with another batch size
    features = compute_features(again, molecules(12), cache=tmp_path)
    assert again.batches[0][0] == "C8"
    np.testing.assert_array_equal(features.matrix[:, 0], np.arange(12))
    assert features.remarks == ("4 molecules were odd",)
    assert [path.name[0] for path in tmp_path.iterdir()] == ["t"]  # no part folder is left


def test_a_damaged_batch_is_computed_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        compute_features(Toy(breaks_at="C9"), molecules(12), cache=tmp_path)
    (second,) = tmp_path.glob(".toy-*/000000004.npz")
    second.write_bytes(second.read_bytes()[:-30])
    again = Toy()
    features = compute_features(again, molecules(12), cache=tmp_path)
    assert [one[0] for one in again.batches] == ["C4", "C8"]
    np.testing.assert_array_equal(features.matrix[:, 0], np.arange(12))


def test_a_first_batch_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        compute_features(Toy(breaks_at="C0"), molecules(12), cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def _truncated(folder):
    path = folder / "features.npy"
    path.write_bytes(path.read_bytes()[:-4])


def _flipped(folder):
    path = folder / "features.npy"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def _of_other_data(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": "0" * 64}))


def _of_another_shape(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shape": [3, 2]}))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (_truncated, "features.npy has [0-9,]+ bytes instead of"),
        (_flipped, "features.npy has changed since it was written"),
        (_of_other_data, "made from other molecules or by another encoder"),
        (_of_another_shape, "does not match its manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), "incomplete or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "incomplete or damaged"),
    ],
)
def test_a_damaged_cache_is_refused(tmp_path, harm, why):
    compute_features(Toy(), molecules(6), cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    harm(folder)
    with pytest.raises(BadData, match=f"{folder.name} cannot be used: .*{why}.*Try: delete that folder"):
        compute_features(Toy(), molecules(6), cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOption, match="features cannot be written to .*another cache="):
        compute_features(Toy(), molecules(3), cache=tmp_path / "file")


def test_batch_bytes_bound_a_batch(tmp_path):
    encoder = Toy()
    compute_features(encoder, molecules(4), cache=tmp_path, batch_bytes=200)
    assert [len(one) for one in encoder.batches] == [2, 2]
    tiny = Toy(stamp="2")
    compute_features(tiny, molecules(2), cache=tmp_path, batch_bytes=1)
    assert [len(one) for one in tiny.batches] == [1, 1]


def test_running_out_of_memory_halves_the_batch(tmp_path):
    encoder, phrases = Toy(room=2), []
    features = compute_features(encoder, molecules(6), cache=tmp_path, progress=phrases.append)
    assert [len(one) for one in encoder.batches] == [2, 2, 2]
    np.testing.assert_array_equal(features.matrix[:, 0], np.arange(6))
    assert "toy: out of memory, continuing with batches of 2" in phrases
    with pytest.raises(DoesNotFit, match="one molecule of some.csv, row 10 .C0"):
        compute_features(Toy(room=0, stamp="2"), molecules(6), cache=tmp_path)


def test_progress_shows_the_rate_and_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(compute_module, "PROGRESS_EVERY_S", 0.0)
    phrases = []
    compute_features(Toy(), molecules(6), cache=tmp_path, progress=phrases.append)
    assert phrases[0] == "toy: computing features of 6 molecules"
    assert phrases[1].startswith("toy: 4 of 6 molecules, ")
    assert re.search(r"\d m?s left$", phrases[1])
    assert phrases[2].startswith("toy: 6 molecules × 2 features (48 B) in ")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_named_by_its_row(tmp_path, value):
    class Broken(Toy):
        def encode(self, some):
            encoded = super().encode(some)
            encoded.matrix[encoded.matrix[:, 0] == 5, 1] = value
            return encoded

    with pytest.raises(BadData, match=r"toy is NaN or infinite in row 15 \(C5\) of some.csv .*, 1 of 8 molecules"):
        compute_features(Broken(), molecules(8), cache=tmp_path)


def test_a_width_that_changes_is_refused(tmp_path):
    class Wider(Toy):
        def encode(self, some):
            matrix = super().encode(some).matrix
            return Encoded(matrix=matrix if some.smiles[0] == "C0" else np.hstack([matrix, matrix]))

    with pytest.raises(BadData, match="toy gave 2 features for the first molecules and 4 from molecule 4 on"):
        compute_features(Wider(), molecules(8), cache=tmp_path)


def test_two_processes_share_one_computation(tmp_path):
    """The second waits for the first, encodes nothing, and both read the same matrix."""
    context = multiprocessing.get_context("fork")
    begun, may_end, results = context.Event(), context.Event(), context.Queue()

    class Slow(Toy):
        def encode(self, some):
            begun.set()
            may_end.wait(20)
            return super().encode(some)

    first = context.Process(target=_compute, args=(Slow(), tmp_path, results))
    first.start()
    assert begun.wait(20)
    second = Toy()
    phrases: list[str] = []
    release = threading.Thread(target=_release, args=(phrases, may_end))
    release.start()
    features = compute_features(second, molecules(8), cache=tmp_path, progress=phrases.append)
    first.join(20)
    release.join(20)
    assert "toy: another process computes these features, waiting for it" in phrases
    assert second.batches == []
    assert results.get(timeout=20) == features.matrix[:].tolist()


def _compute(encoder, cache, results):
    results.put(compute_features(encoder, molecules(8), cache=cache).matrix[:].tolist())


def _release(phrases, may_end):
    while not phrases:
        time.sleep(0.01)
    may_end.set()
