"""Recipes: every one can be asked for, and none decides what memory should."""

from importlib import resources

import pytest

from brimful.cli.flags import from_recipe, part
from brimful.cli.train import KNOWN
from brimful.planning.target import PlanOptions
from brimful.tasks.chatlm import ChatOptions
from brimful.training.options import TrainOptions

NAMES = sorted(
    one.name.removesuffix(".toml") for one in resources.files("brimful.recipes").iterdir() if one.name.endswith(".toml")
)


def test_the_recipes_that_the_help_names_are_there():
    assert NAMES == ["demo", "fast", "low-memory", "pretrain", "small"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_holds_options_that_train_takes(name):
    asked = from_recipe(name, KNOWN, "train")
    for owner in (ChatOptions, TrainOptions, PlanOptions):
        owner(**part(asked, owner))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fixes_nothing_that_memory_decides(name):
    assert not {"micro_batch", "checkpointing", "memory_limit", "plan"} & from_recipe(name, KNOWN, "train").keys()
