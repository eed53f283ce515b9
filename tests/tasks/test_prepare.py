"""Raw files become a token store once, with the tokenizer that the model needs."""

import json
import shutil
from pathlib import Path

import pytest

from brimful.data.store import Store
from brimful.data.tokens import TokenizerFacts
from brimful.errors import BadData, BadModel, BadOption
from brimful.tasks.chatlm import ChatOptions, Pretrain, Sft
from tests.tasks.tiny import ROWS, make_tokenizer, write_jsonl


class Desk:
    """A folder to pack into, and what was said meanwhile."""

    def __init__(self, folder):
        self.folder, self.said = folder, []

    def pack(self, task, data, **how):
        self.said.clear()
        return task.prepare(str(data), self.folder, self.said.append, **how)

    @property
    def packed(self):
        """What a pack that was made says last."""
        return [sentence for sentence in self.said if sentence.startswith("packed ") and " of " in sentence]

    @property
    def stores(self):
        return sorted(path.name for path in self.folder.iterdir() if (path / "store.json").exists())


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path / "data")


@pytest.fixture
def raw(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


def task(place, **options):
    return Pretrain(options=ChatOptions(from_=str(place.model), **options))


def fingerprint(store):
    return Store.open(store).meta.tokenizer_fingerprint


def test_a_token_store_is_taken_as_it_is(place, desk):
    store = str(place.store.path)
    assert desk.pack(task(place), store) == store
    assert not desk.folder.exists() and not desk.said


@pytest.mark.parametrize(
    ("option", "flag"), [("tokenizer", "--tokenizer"), ("columns", "--columns"), ("max_tokens", "--max-tokens")]
)
def test_what_is_for_raw_files_is_refused_with_a_store(place, desk, option, flag):
    with pytest.raises(BadOption) as told:
        desk.pack(task(place, **{option: "8"}), place.store.path)
    assert str(told.value).startswith(f"{flag}: {place.store.path} is a token store, packed already")


@pytest.mark.parametrize("options", [{"max_tokens": 6}, {"columns": "prompt=response,response=prompt"}])
def test_but_not_with_a_store_that_was_packed_here_as_asked(place, desk, raw, options):
    """So a run goes on when the raw files are gone."""
    store = desk.pack(task(place, **options), raw)
    raw.unlink()
    assert desk.pack(task(place, **options), store) == store


def test_a_store_to_evaluate_on_has_the_tokenizer_of_the_rows_to_train_on(place, desk, raw, tmp_path):
    other = make_tokenizer(tmp_path / "other", ROWS[:2])
    valid = desk.pack(task(place, tokenizer=str(other)), raw)
    assert desk.pack(task(place), place.store.path, like=place.store) == str(place.store.path)
    with pytest.raises(BadData, match=f"^--valid {valid} was packed with another tokenizer than {place.store.path}"):
        desk.pack(task(place), valid, like=place.store)


def test_ids_at_odds_with_the_model_are_told_before_any_work(place, desk, raw, tmp_path):
    folder = shutil.copytree(place.model, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    with pytest.raises(BadModel, match="its tokenizer's eos is 1 and the model's 5"):
        desk.pack(Pretrain(options=ChatOptions(from_=str(folder))), raw)
    assert not desk.folder.exists()


def test_what_became_of_the_texts_is_told_in_the_plan(place, desk, raw):
    asked = task(place, max_tokens=6)
    store = asked.rows(desk.pack(asked, raw))
    (tokenizer, *_, whose), (name, requested, effective, why) = asked.remarks(store)
    assert (tokenizer, whose) == ("tokenizer", "the model's")
    assert (name, requested, effective) == ("max_tokens", "6", "6+6")
    assert f"{store.meta.truncated['prompt']} of 24 prompts" in why


def test_raw_files_are_packed_with_the_models_own_tokenizer(place, desk, raw):
    store = Store.open(desk.pack(task(place), raw))
    assert store.path.parent == desk.folder and store.path.name.startswith("train-")
    assert [row["response"].tolist() for row in store] == [row["response"].tolist() for row in place.store]
    assert store.meta.tokenizer_fingerprint == TokenizerFacts.read(place.model).fingerprint
    assert desk.packed == [f"packed 24 of 24 rows of {raw}"]


def test_a_second_time_the_store_is_found(place, desk, raw):
    first = desk.pack(task(place), raw)
    before = (Path(first) / "store.json").stat().st_mtime_ns
    assert desk.pack(task(place), raw) == first
    assert (Path(first) / "store.json").stat().st_mtime_ns == before
    assert not desk.said


def test_a_changed_file_is_packed_anew(place, desk, raw):
    first = desk.pack(task(place), raw)
    write_jsonl(raw, ROWS[:5])
    second = desk.pack(task(place), raw)
    assert (len(Store.open(first)), len(Store.open(second))) == (24, 5)
    assert desk.packed == [f"packed 5 of 5 rows of {raw}"]


@pytest.mark.parametrize(
    "options", [{"max_tokens": 6}, {"columns": "prompt=response,response=prompt"}], ids=["lengths", "columns"]
)
def test_asked_for_otherwise_it_is_packed_anew(place, desk, raw, options):
    first, second = desk.pack(task(place), raw), desk.pack(task(place, **options), raw)
    assert first != second and len(desk.stores) == 2
    assert Store.open(first)[0]["prompt"].tolist() != Store.open(second)[0]["prompt"].tolist()


def test_with_another_tokenizer_it_is_packed_anew(place, desk, raw, tmp_path):
    own = make_tokenizer(tmp_path / "own", ROWS[:2])
    assert desk.pack(task(place), raw) != desk.pack(task(place, tokenizer=str(own)), raw)


def test_a_tokenizer_that_was_trained_for_the_run_is_not_trained_again(desk, raw):
    new = Pretrain(options=ChatOptions(size="tiny"))
    first = desk.pack(new, raw)
    assert desk.pack(new, raw) == first
    assert not desk.said


def test_whose_tokens_they_are_is_told(place, desk, raw):
    new = Pretrain(options=ChatOptions(size="tiny"))
    packed_here = new.rows(desk.pack(new, raw))
    assert new.remarks(packed_here)[0][-1] == "trained on the data, since a new model has none"
    assert new.remarks(place.store)[0][-1] == "the store's own"


def test_a_pack_without_its_end_is_made_whole(place, desk, raw):
    store = desk.pack(task(place), raw)
    shutil.rmtree(store)
    (desk.folder / f".{Path(store).name}.part").mkdir()
    assert desk.pack(task(place), raw) == store
    assert len(Store.open(store)) == 24


def test_what_was_dropped_and_cut_is_said(place, desk, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:6], {"prompt": "", "response": "x"}])
    store = Store.open(desk.pack(task(place, max_tokens="8,4"), data))
    assert store.meta.max_tokens == {"prompt": 8, "response": 4}
    [said] = desk.packed
    assert said.startswith(f"packed 6 of 7 rows of {data}; dropped: 1 ")
    cut = sum(store.meta.truncated.values())
    assert cut > 6 and said.endswith(f"; {cut} sides were longer than 8+4 tokens and are cut")


def test_rows_are_cut_at_the_models_lengths_unless_asked_otherwise(place, desk, raw):
    store = Store.open(desk.pack(task(place), raw))
    assert tuple(store.meta.max_tokens.values()) == Pretrain(options=ChatOptions(size="base")).worst_shape


def test_a_tokenizer_that_was_given_is_used(place, desk, raw, tmp_path):
    own = make_tokenizer(tmp_path / "own", ROWS[:2])
    store = desk.pack(task(place, tokenizer=str(own)), raw)
    assert fingerprint(store) == TokenizerFacts.read(own).fingerprint != TokenizerFacts.read(place.model).fingerprint


def test_a_new_model_has_a_tokenizer_trained_once_and_the_rows_to_evaluate_on_share_it(desk, raw, tmp_path):
    new = Pretrain(options=ChatOptions(size="tiny"))
    train = desk.pack(new, raw)
    assert any("trained a tokenizer of" in sentence for sentence in desk.said)
    valid = desk.pack(new, write_jsonl(tmp_path / "valid.jsonl", ROWS[:3]), like=Store.open(train), name="valid")
    assert not any("tokenizer" in sentence for sentence in desk.said)
    assert [name.split("-")[0] for name in desk.stores] == ["train", "valid"]
    assert fingerprint(train) == fingerprint(valid) == TokenizerFacts.read(desk.folder / "tokenizer").fingerprint
    assert new.rows(valid).meta.vocab_size <= 4096


def test_rows_to_evaluate_on_have_the_tokenizer_of_a_store_that_was_packed_before(place, desk, raw):
    store = desk.pack(Pretrain(options=ChatOptions(size="tiny")), raw, like=place.store, name="valid")
    assert fingerprint(store) == place.store.meta.tokenizer_fingerprint
    assert not (desk.folder / "tokenizer").exists()


def test_they_have_it_even_where_another_tokenizer_was_given(place, desk, raw, tmp_path):
    own = make_tokenizer(tmp_path / "own", ROWS[:2])
    store = desk.pack(task(place, tokenizer=str(own)), raw, like=place.store, name="valid")
    assert fingerprint(store) == place.store.meta.tokenizer_fingerprint


def test_files_that_are_not_there_are_refused_and_leave_nothing(place, desk, tmp_path):
    with pytest.raises(BadData):
        desk.pack(task(place), tmp_path / "no.jsonl")
    assert not desk.folder.exists()


def test_a_model_without_a_tokenizer_says_what_to_do(place, desk, raw, tmp_path):
    folder = shutil.copytree(place.model, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadData, match="is no folder with a tokenizer.json"):
        desk.pack(Pretrain(options=ChatOptions(from_=str(folder))), raw)


def test_random_weights_are_not_fine_tuned_unless_asked_for(desk, raw):
    with pytest.raises(BadOption) as told:
        desk.pack(Sft(options=ChatOptions(size="tiny")), raw)
    assert str(told.value).startswith("chatlm-sft fine-tunes a model: name one with --from")
    assert not desk.folder.exists()


def test_random_weights_that_were_asked_for_are_fine_tuned(desk, raw):
    store = desk.pack(Sft(options=ChatOptions(size="tiny", random_weights=True)), raw)
    assert len(Store.open(store)) == 24


def test_a_model_that_is_named_is_fine_tuned(place, desk, raw):
    assert len(Store.open(desk.pack(Sft(options=ChatOptions(from_=str(place.model))), raw))) == 24


def test_the_report_beside_the_store_s_tokenizer_is_no_part_of_its_key(place, desk, raw, tmp_path):
    folder = shutil.copytree(place.model, tmp_path / "copy")
    (folder / "report.json").write_text(json.dumps({}))
    first = desk.pack(task(place), raw)
    assert desk.pack(Pretrain(options=ChatOptions(from_=str(folder))), raw) == first
