"""Flags made from classes of options, and who wins: a flag over a config file over a recipe."""

from dataclasses import dataclass, fields

import pytest

from brimful.cli.app import main
from brimful.cli.flags import flags_of, from_file, from_recipe, given, known, part, sentences
from brimful.cli.train import KNOWN
from brimful.errors import BadOption
from brimful.planning.target import PlanOptions
from brimful.tasks.chatlm import ChatOptions
from brimful.training.options import TrainOptions

OWNERS = [ChatOptions, TrainOptions, PlanOptions]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Some options."""

    from_: str | None = None
    """Where to begin:
    a folder."""
    rate: float = 0.5
    """How fast."""
    twice: bool = False
    """Do it twice."""

    @property
    def doubled(self) -> float:
        """No option."""
        return 2 * self.rate


def test_a_sentence_is_what_stands_below_its_field():
    assert sentences(Sample) == {"from_": "Where to begin: a folder.", "rate": "How fast.", "twice": "Do it twice."}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_option_has_its_sentence(owner):
    assert set(sentences(owner)) == {field.name for field in fields(owner)}


@pytest.mark.parametrize("owner", OWNERS)
def test_no_two_classes_mean_different_things_by_one_word(owner):
    others = {field.name for other in OWNERS if other is not owner for field in fields(other)}
    assert not others & {field.name for field in fields(owner)}


def test_what_was_not_said_is_not_given():
    made = flags_of("Flags", {"Some": Sample})
    assert given(made()) == {}
    assert given(made(rate=0.5, twice=False)) == {"rate": 0.5, "twice": False}


def test_from_is_called_from_everywhere_but_in_python():
    made = flags_of("Flags", {"Some": Sample})
    assert given(made(from_="x")) == {"from": "x"}
    assert known({"Some": Sample}) == ["from", "rate", "twice"]
    assert part({"from": "x", "other": 1}, Sample) == {"from_": "x"}


def test_some_fields_may_be_left_out():
    made = flags_of("Flags", {"Some": Sample}, without=["rate"])
    assert [field.name for field in fields(made)] == ["from_", "twice"]


def test_a_class_takes_its_part_of_what_was_asked():
    asked = {"lr": 0.1, "fill": 0.5, "from": "model", "seed": 3}
    assert part(asked, TrainOptions) == {"lr": 0.1}
    assert part(asked, PlanOptions) == {"fill": 0.5, "seed": 3}
    assert part(asked, ChatOptions) == {"from_": "model"}


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_file_gives_its_top_and_the_commands_own_table(config):
    path = config('max-steps = 5\nlr = 1\n[train]\nlr = 2\nfrom = "x"\n[fit]\nlr = 3\n')
    assert from_file(path, ["max_steps", "lr", "from"], "train") == {"max_steps": 5, "lr": 2, "from": "x"}
    assert from_file(path, ["max_steps", "lr", "from"], "fit") == {"max_steps": 5, "lr": 3}


@pytest.mark.parametrize("text", ["learning-rate = 1", "[train]\nlearning-rate = 1"])
def test_an_unknown_key_is_refused_with_those_that_are_known(config, text):
    path = config(text)
    with pytest.raises(BadOption) as told:
        from_file(path, ["lr", "from"], "train")
    assert str(told.value) == f"--config {path}: unknown option learning_rate; known are lr, from"


def test_python_s_spelling_of_from_is_unknown_to_a_file(config):
    with pytest.raises(BadOption, match="unknown option from_;"):
        from_file(config('from_ = "x"'), ["from"], "train")


@pytest.mark.parametrize("text", ["lr = ", "[train", "lr = 1\nlr = 2"])
def test_a_file_that_is_no_toml_is_refused(config, text):
    path = config(text)
    with pytest.raises(BadOption, match=f"^--config {path}: "):
        from_file(path, ["lr"], "train")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadOption, match="a.toml: "):
        from_file(tmp_path / "a.toml", [], "train")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadOption) as told:
        from_file(tmp_path / "no.toml", [], "train")
    assert str(told.value) == f"--config {tmp_path / 'no.toml'}: No such file or directory"


def test_a_misspelt_table_is_refused(config):
    with pytest.raises(BadOption):
        from_file(config("[trian]\nlr = 1"), ["lr"], "train")


def test_a_value_in_the_place_of_the_table_is_refused(config):
    with pytest.raises(BadOption):
        from_file(config("train = 1"), ["lr"], "train")


def test_an_unknown_recipe_is_told_those_there_are():
    with pytest.raises(BadOption) as told:
        from_recipe("smal", ["lr"], "train")
    assert str(told.value) == (
        "--recipe smal: there are demo, fast, low-memory, pretrain, small; a file of yours is given with --config"
    )


def test_without_a_recipe_or_a_file_nothing_is_asked():
    assert from_recipe(None, [], "train") == from_file(None, [], "train") == {}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What `brimful train` would train with, as a launcher's process gets it."""
    heard = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("brimful.cli.train_process.work", heard.append)
    monkeypatch.setattr("brimful.cli.train.prefer_growing_segments", lambda: None)

    def of(*tokens):
        with pytest.raises(SystemExit) as left:
            main(["train", "chatlm-sft", "rows.jsonl", *tokens])
            raise SystemExit(0)
        assert left.value.code in (0, None)
        return heard.pop()["asked"]

    return of


def test_a_flag_wins_over_the_file_and_the_file_over_the_recipe(asked, config):
    recipe = from_recipe("fast", KNOWN, "train")
    path = config("epochs = 7\n[train]\nglobal-batch = 33\nwarmup = 5\n")
    (path.parent / "model").mkdir()
    found = asked("--recipe", "fast", "--config", str(path), "--global-batch", "44", "--from", "model")
    assert (recipe["epochs"], recipe["global_batch"]) != (7, 44)
    assert (found["global_batch"], found["epochs"], found["warmup"], found["from"]) == (44, 7, 5, "model")
    assert found["lr"] == recipe["lr"] and found["mix"] == recipe["mix"]


def test_only_what_was_said_is_asked(asked):
    assert asked("--run", "here", "--lr", "0.1") == {"run": "here", "lr": 0.1, "resume": False}


def test_a_false_said_aloud_wins_over_a_file(asked, config):
    assert asked("--config", str(config("cache = true")), "--no-cache")["cache"] is False
