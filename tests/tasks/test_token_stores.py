"""Raw files are tokenized once, with the tokenizer that the model needs."""

import json
import re
import shutil
from pathlib import Path

import pytest

from brimful.data.store import Store
from brimful.data.tokenizer.folder import TokenizerFacts
from brimful.errors import BadData, BadModel, BadOption
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions
from brimful.units import MiB
from tests.tasks.tiny import ROWS, make_tokenizer, write_jsonl


class Desk:
    """A folder for token stores, and the progress messages of the last `prepare`."""

    def __init__(self, folder):
        self.folder, self.messages = folder, []

    def prepare(self, task, data, **options):
        self.messages.clear()
        return task.prepare(str(data), self.folder, self.messages.append, **options)

    @property
    def summary(self):
        """The messages about finished stores."""
        return [line for line in self.messages if re.match(r"tokenized [\d,]+ of", line)]

    @property
    def stores(self):
        return sorted(path.name for path in self.folder.iterdir() if (path / "store.json").exists())


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path / "data")


@pytest.fixture
def raw(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


def task(tiny, **options):
    return Pretrain(options=LanguageOptions(model=str(tiny.model), **options))


def fingerprint(store):
    return Store.open(store).meta.tokenizer_fingerprint


def test_a_token_store_is_used_as_it_is(tiny, desk):
    store = str(tiny.store.path)
    assert desk.prepare(task(tiny), store) == store
    assert not desk.folder.exists() and not desk.messages


@pytest.mark.parametrize(("option", "value"), [("tokenizer", "/"), ("columns", "8"), ("max_tokens", "8")])
def test_options_for_raw_files_are_refused_with_a_store(tiny, desk, option, value):
    with pytest.raises(BadOption, match=f"^{option}= cannot be used with {tiny.store.path}"):
        desk.prepare(task(tiny, **{option: value}), tiny.store.path)


@pytest.mark.parametrize("options", [{"max_tokens": 6}, {"columns": "prompt=response,response=prompt"}])
def test_but_not_with_a_store_that_was_made_here_with_them(tiny, desk, raw, options):
    """A run can be resumed without its raw files."""
    store = desk.prepare(task(tiny, **options), raw)
    raw.unlink()
    assert desk.prepare(task(tiny, **options), store) == store


def test_a_store_for_validation_must_have_the_tokenizer_of_the_training_rows(tiny, desk, raw, tmp_path):
    other = make_tokenizer(tmp_path / "other", ROWS[:2])
    valid = desk.prepare(task(tiny, tokenizer=str(other)), raw)
    assert desk.prepare(task(tiny), tiny.store.path, like=tiny.store) == str(tiny.store.path)
    with pytest.raises(BadData, match=f"^valid='{valid}' was made with another tokenizer than {tiny.store.path}"):
        desk.prepare(task(tiny), valid, like=tiny.store)


def test_ids_that_are_not_the_models_are_refused_before_any_work(tiny, desk, raw, tmp_path):
    folder = shutil.copytree(tiny.model, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    with pytest.raises(BadModel, match="its eos id is 1 and the model's 5"):
        desk.prepare(Pretrain(options=LanguageOptions(model=str(folder))), raw)
    assert not desk.folder.exists()


def test_tokenizer_and_truncation_are_choices_of_the_plan(tiny, desk, raw):
    asked = task(tiny, max_tokens=6)
    store = asked.rows(desk.prepare(asked, raw))
    (tokenizer, *_, whose), (name, requested, effective, why), _ = asked.remarks(store)
    assert (tokenizer, whose) == ("tokenizer", "the tokenizer of the model")
    assert (name, requested, effective) == ("max_tokens", "6", "6+6")
    assert f"{store.meta.truncated['prompt']} of 24 prompts" in why


def test_raw_files_are_tokenized_with_the_models_own_tokenizer(tiny, desk, raw):
    store = Store.open(desk.prepare(task(tiny), raw))
    assert store.path.parent == desk.folder and store.path.name.startswith("train-")
    assert [row["response"].tolist() for row in store] == [row["response"].tolist() for row in tiny.store]
    assert store.meta.tokenizer_fingerprint == TokenizerFacts.read(tiny.model).fingerprint
    assert desk.summary == [f"tokenized 24 of 24 rows of {raw}: found prompt and response"]


def test_the_store_is_reused(tiny, desk, raw):
    first = desk.prepare(task(tiny), raw)
    before = (Path(first) / "store.json").stat().st_mtime_ns
    assert desk.prepare(task(tiny), raw) == first
    assert (Path(first) / "store.json").stat().st_mtime_ns == before
    assert not desk.messages


def test_a_changed_file_is_tokenized_again(tiny, desk, raw):
    first = desk.prepare(task(tiny), raw)
    write_jsonl(raw, ROWS[:5])
    second = desk.prepare(task(tiny), raw)
    assert (len(Store.open(first)), len(Store.open(second))) == (24, 5)
    assert desk.summary == [f"tokenized 5 of 5 rows of {raw}: found prompt and response"]


@pytest.mark.parametrize(
    "options", [{"max_tokens": 6}, {"columns": "prompt=response,response=prompt"}], ids=["lengths", "columns"]
)
def test_with_other_options_it_is_tokenized_again(tiny, desk, raw, options):
    first, second = desk.prepare(task(tiny), raw), desk.prepare(task(tiny, **options), raw)
    assert first != second and len(desk.stores) == 2
    assert Store.open(first)[0]["prompt"].tolist() != Store.open(second)[0]["prompt"].tolist()


def test_with_another_tokenizer_it_is_tokenized_again(tiny, desk, raw, tmp_path):
    own = make_tokenizer(tmp_path / "own", ROWS[:2])
    assert desk.prepare(task(tiny), raw) != desk.prepare(task(tiny, tokenizer=str(own)), raw)


def test_a_tokenizer_that_was_trained_for_the_run_is_not_trained_again(desk, raw):
    new = Pretrain(options=LanguageOptions(model="chatlm-tiny"))
    first = desk.prepare(new, raw)
    assert desk.prepare(new, raw) == first
    assert not desk.messages


def test_the_origin_of_the_tokenizer_is_shown(tiny, desk, raw):
    new = Pretrain(options=LanguageOptions(model="chatlm-tiny"))
    made_here = new.rows(desk.prepare(new, raw))
    assert new.remarks(made_here)[0][-1] == "trained on the data, because a new model has none"
    assert new.remarks(tiny.store)[0][-1] == "the tokenizer of the token store"


def test_an_unfinished_store_is_completed(tiny, desk, raw):
    store = desk.prepare(task(tiny), raw)
    shutil.rmtree(store)
    (desk.folder / f".{Path(store).name}.part").mkdir()
    assert desk.prepare(task(tiny), raw) == store
    assert len(Store.open(store)) == 24


def test_dropped_and_truncated_rows_are_counted(tiny, desk, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:6], {"prompt": "", "response": "x"}])
    store = Store.open(desk.prepare(task(tiny, max_tokens="8,4"), data))
    assert store.meta.max_tokens == {"prompt": 8, "response": 4}
    [message] = desk.summary
    assert message.startswith(
        f"tokenized 6 of 7 rows of {data}: found prompt and response; dropped 1 with an empty field"
    )
    truncated = sum(store.meta.truncated.values())
    assert truncated > 6 and message.endswith(f"; truncated {truncated} texts to 8+4 tokens")


def test_dropped_rows_are_a_choice_of_the_plan(tiny, desk, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:6], {"prompt": "", "response": "x"}])
    chat = task(tiny)
    choices = chat.remarks(Store.open(desk.prepare(chat, data)))
    assert ("rows", 7, 6, "dropped 1 with an empty field") in choices


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, r"rows of text \(from text\), and pretrain trains on prompts and responses."),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"Try: columns='prompt=prompt,response=chosen'\."),
    ],
)
def test_rows_of_another_kind_are_refused_with_the_columns_to_name(tiny, desk, tmp_path, row, message):
    with pytest.raises(BadData, match=message):
        desk.prepare(task(tiny), write_jsonl(tmp_path / "rows.jsonl", [row]))


def test_rows_are_truncated_to_the_models_lengths_by_default(tiny, desk, raw):
    store = Store.open(desk.prepare(task(tiny), raw))
    assert tuple(store.meta.max_tokens.values()) == Pretrain(options=LanguageOptions(model="chatlm-base")).worst_shape


def test_a_requested_tokenizer_is_used(tiny, desk, raw, tmp_path):
    own = make_tokenizer(tmp_path / "own", ROWS[:2])
    store = desk.prepare(task(tiny, tokenizer=str(own)), raw)
    assert fingerprint(store) == TokenizerFacts.read(own).fingerprint != TokenizerFacts.read(tiny.model).fingerprint


def test_a_new_model_gets_one_tokenizer_for_training_and_validation_rows(desk, raw, tmp_path):
    new = Pretrain(options=LanguageOptions(model="chatlm-tiny"))
    train = desk.prepare(new, raw)
    assert any("trained a tokenizer of" in line for line in desk.messages)
    valid = desk.prepare(new, write_jsonl(tmp_path / "valid.jsonl", ROWS[:3]), like=Store.open(train), name="valid")
    assert not any("tokenizer" in line for line in desk.messages)
    assert [name.split("-")[0] for name in desk.stores] == ["train", "valid"]
    assert fingerprint(train) == fingerprint(valid) == TokenizerFacts.read(desk.folder / "tokenizer").fingerprint
    assert new.rows(valid).meta.vocab_size <= 4096


def test_validation_rows_use_the_tokenizer_of_an_existing_training_store(tiny, desk, raw):
    store = desk.prepare(Pretrain(options=LanguageOptions(model="chatlm-tiny")), raw, like=tiny.store, name="valid")
    assert fingerprint(store) == tiny.store.meta.tokenizer_fingerprint
    assert not (desk.folder / "tokenizer").exists()


def test_they_use_it_even_if_another_tokenizer_was_requested(tiny, desk, raw, tmp_path):
    own = make_tokenizer(tmp_path / "own", ROWS[:2])
    store = desk.prepare(task(tiny, tokenizer=str(own)), raw, like=tiny.store, name="valid")
    assert fingerprint(store) == tiny.store.meta.tokenizer_fingerprint


def test_missing_files_are_refused_and_leave_nothing(tiny, desk, tmp_path):
    with pytest.raises(BadData):
        desk.prepare(task(tiny), tmp_path / "no.jsonl")
    assert not desk.folder.exists()


def test_a_model_without_a_tokenizer_says_what_to_do(tiny, desk, raw, tmp_path):
    folder = shutil.copytree(tiny.model, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadData, match="has no tokenizer.json"):
        desk.prepare(Pretrain(options=LanguageOptions(model=str(folder))), raw)


def test_random_weights_are_not_fine_tuned_by_default():
    with pytest.raises(BadOption, match="sft needs a model to fine-tune, and model= is missing. Try: a model folder"):
        Sft(options=SftOptions())


def test_random_weights_are_fine_tuned_on_request(desk, raw):
    store = desk.prepare(Sft(options=SftOptions(model="chatlm-tiny")), raw)
    assert len(Store.open(store)) == 24


def test_a_saved_model_is_fine_tuned(tiny, desk, raw):
    assert len(Store.open(desk.prepare(Sft(options=SftOptions(model=str(tiny.model))), raw))) == 24


def test_the_report_beside_the_tokenizer_is_not_part_of_the_key(tiny, desk, raw, tmp_path):
    folder = shutil.copytree(tiny.model, tmp_path / "copy")
    (folder / "report.json").write_text(json.dumps({}))
    first = desk.prepare(task(tiny), raw)
    assert desk.prepare(Pretrain(options=LanguageOptions(model=str(folder))), raw) == first


def test_the_host_limit_bounds_the_rows_that_are_read(tiny, desk, tmp_path):
    rows = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "问" * 1_000_000, "response": "答"}])
    limited = task(tiny)
    limited.host_limit_bytes = 64 * MiB
    with pytest.raises(BadData, match="longer than 2 MiB, the most for host_limit='64MiB'"):
        desk.prepare(limited, rows)


def test_the_host_limit_bounds_tokenizing(tiny, desk, raw):
    limited = task(tiny)
    limited.host_limit_bytes = 64 * MiB
    with pytest.raises(BadOption, match="host_limit='64MiB' is too small"):
        desk.prepare(limited, raw)


def test_the_host_limit_bounds_a_new_tokenizer(desk, raw):
    limited = Pretrain(options=LanguageOptions(model="chatlm-tiny"))
    limited.host_limit_bytes = 64 * MiB
    with pytest.raises(BadOption, match="host_limit='64MiB' is too small"):
        desk.prepare(limited, raw)
    assert not (desk.folder / "tokenizer").exists()
