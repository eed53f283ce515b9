"""Recipes: every one can be used, and none decides what memory should."""

from importlib import resources

import pytest

from brimful.cli.flags import collect, make_flags
from brimful.planning.plan_options import PlanOptions
from brimful.tasks.load import check_request_options
from brimful.training.options import TrainOptions
from brimful.training.run import pick

NAMES = sorted(
    one.name.removesuffix(".toml") for one in resources.files("brimful.recipes").iterdir() if one.name.endswith(".toml")
)


def options_of(recipe):
    return collect("train", make_flags({})(), config=None, recipe=recipe, task=lambda: "sft")


def test_the_recipes_that_the_help_names_are_there():
    assert NAMES == ["demo", "fast", "low-memory", "pretrain", "small"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_holds_options_that_train_takes(name):
    options = options_of(name)
    TrainOptions(**pick(options.generic, TrainOptions))
    PlanOptions(**pick(options.generic, PlanOptions))
    check_request_options("sft", {"model": "chatlm-tiny", **options.task}, None)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_warms_up_for_a_share_of_the_run_however_short_it_is(name):
    assert options_of(name).generic["warmup"].endswith("%")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fixes_nothing_that_memory_decides(name):
    assert not {"micro_batch", "checkpointing", "memory_limit", "plan"} & options_of(name).generic.keys()
