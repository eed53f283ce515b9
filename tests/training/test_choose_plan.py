"""Which plan a run trains with: the one given, the one it had while it holds, or a new one, the same for equal devices."""

import json
from dataclasses import replace

import pytest
import torch

import brimful
from brimful.errors import BadData, BadRun, UserError
from brimful.planning.plan import Choice, Plan
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import Target
from brimful.step.distributed import SingleProcess, gather_results, on_rank_zero
from brimful.training import choose_plan as module
from brimful.training.choose_plan import PlanChoice
from brimful.training.run import Request, RunFolder
from brimful.units import GiB, MiB
from tests.planning.small import Tagger
from tests.training.test_evaluate import Team


@pytest.fixture(scope="module")
def plan():
    return replace(brimful.plan(Tagger(), memory_limit="4MiB", device="cpu", cache=False), choices=())


@pytest.fixture
def fits(monkeypatch, plan):
    """The options of every plan that was made, none of which is run."""
    options = []

    def find_plan(task, plan_options, target, rows, **how):
        options.append(plan_options)
        return replace(plan, key="new", created=f"plan {len(options)}")

    monkeypatch.setattr(module, "find_plan", find_plan)
    return options


class Desk:
    """A run's planning, with everything as the plan has it unless changed."""

    def __init__(self, tmp_path):
        self.run, self.notes = RunFolder(tmp_path), []

    def choice(
        self,
        *,
        name="the CPU",
        device="cpu",
        limit=4 * MiB,
        group=None,
        file=None,
        resumed=None,
        number=None,
        **options,
    ):
        target = Target(
            device=torch.device(device), name=name, limit_bytes=limit, limit_reason="", fill=0.85, host_limit_bytes=GiB
        )
        return PlanChoice(
            task=Tagger(), rows=[], options=PlanOptions(**options), target=target, group=group or SingleProcess(), run=self.run,
            file=None if file is None else str(file), made_before_for=resumed, number=number, progress=print,
            note=self.notes.append,
        )  # fmt: skip

    def planned(self, **how):
        """The plan, kept in the run's folder as a session keeps it."""
        choice = self.choice(**how)
        plan = choice.plan()
        request = Request(task="tagger", data=None, run=str(self.run.root))
        return choice.save(plan, choice.kept(plan, request), new_run=how.get("resumed") is None)

    def made_for(self, **options):
        """What a run that was planned with these keeps in run.json."""
        return json.loads(json.dumps(self.choice(**options).made_for))


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def test_a_new_run_is_fitted_and_keeps_its_plan(desk, fits):
    found = desk.planned(global_batch=7, memory_limit="4MiB")
    assert (found.key, found.number) == ("new", 1)
    assert Plan.load(desk.run.plan()) == found
    [options] = fits
    assert (options.global_batch, options.memory_limit) == (7, "4MiB")


def test_a_given_plan_is_taken_and_kept(desk, fits, plan, tmp_path):
    plan.save(tmp_path / "given.json")
    found = desk.planned(file=tmp_path / "given.json")
    origin, *others = found.choices
    assert replace(found, choices=tuple(others), number=None) == plan
    assert (origin.name, origin.requested, origin.reason) == (
        "plan",
        "given.json",
        f"made {plan.created}",
    )
    assert Plan.load(desk.run.plan()) == found
    assert not fits


def test_a_given_plan_keeps_to_the_limit_asked_for_now(desk, fits, plan, tmp_path):
    limit = Choice.of("memory_limit", None, 4 * MiB, "what is free", "measured")
    replace(plan, choices=(limit,)).save(tmp_path / "given.json")
    found = desk.planned(file=tmp_path / "given.json", memory_limit="3MiB")
    told = found.choice("memory_limit")
    assert found.limit_bytes == told.requested == told.effective == 3 * MiB
    assert told.reason == "as requested; the plan was made for 4 MiB"


@pytest.mark.parametrize(
    ("changes", "fitting", "said"),
    [
        ({"task": "other"}, {}, "is for task other, not tagger"),
        ({"processes": 3}, {}, "is for 3 processes, not 1"),
        ({}, {"global_batch": 7}, "has a global batch of 50, not 7"),
        ({"task": "other", "processes": 3}, {}, "is for task other, not tagger and is for 3 processes, not 1"),
    ],
    ids=["task", "processes", "global batch", "both"],
)
def test_a_given_plan_of_something_else_is_refused(desk, fits, plan, tmp_path, changes, fitting, said):
    replace(plan, **changes).save(tmp_path / "given.json")
    with pytest.raises(BadRun) as told:
        desk.choice(file=tmp_path / "given.json", **fitting).plan()
    assert f"given.json' {said}. " in str(told.value)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "5", pytest.param("[" * 100_000, id="deep")])
def test_a_given_file_that_is_no_plan_is_refused(desk, fits, tmp_path, content):
    (tmp_path / "given.json").write_text(content)
    with pytest.raises(BadRun, match="cannot be read as a plan"):
        desk.choice(file=tmp_path / "given.json").plan()


def test_a_new_run_does_not_take_a_plan_that_lies_in_its_folder(desk, fits, plan):
    plan.save(desk.run.plan())
    assert desk.choice().plan().key == "new"


def test_a_resumed_run_keeps_its_plan(desk, fits, plan):
    asked = {"global_batch": 50, "lengths": (64,), "memory_limit": "4MiB"}
    plan.save(desk.run.plan())
    assert desk.choice(resumed=desk.made_for(**asked), **asked).plan() == plan
    assert not fits and not desk.notes


@pytest.mark.parametrize("free", [{"cache": False}, {"device": "cpu:0"}], ids=["cache", "device"])
def test_where_a_plan_is_kept_and_how_a_device_is_called_may_change(desk, fits, plan, free):
    plan.save(desk.run.plan())
    resumed = desk.made_for()
    choice = replace(desk.choice(resumed=resumed), options=PlanOptions(**free))
    assert choice.plan() == plan


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({"global_batch": 50}, {"global_batch": 40}, "global-batch"),
        ({}, {"micro_batch": 2, "processes": 2}, "micro-batch, processes"),
        ({"lengths": (64,)}, {"lengths": (32,)}, "lengths"),
    ],
    ids=["global batch", "two", "lengths"],
)
def test_a_run_resumed_with_other_values_is_fitted_anew_and_says_why(desk, fits, plan, before, now, named):
    plan.save(desk.run.plan())
    assert desk.planned(resumed=desk.made_for(**before), **now).key == "new"
    assert Plan.load(desk.run.plan()).key == "new"
    assert desk.notes == [f"making a new plan because this changed since the run began: {named}"]


def test_a_run_resumed_on_another_device_is_fitted_anew(desk, fits, plan):
    plan.save(desk.run.plan())
    assert desk.choice(resumed=desk.made_for(), name="a card", limit=MiB).plan().key == "new"
    assert desk.notes == [
        "making a new plan because this changed since the run began: the device (1 MiB on a card now, 4 MiB on the CPU before)"
    ]


@pytest.mark.parametrize(("limit", "kept"), [(4 * MiB, True), (int(3.9 * MiB), True), (2 * MiB, False)])
def test_a_card_with_much_less_room_needs_a_new_plan(desk, fits, plan, limit, kept):
    replace(plan, device_name="a card").save(desk.run.plan())
    resumed = desk.made_for()
    found = desk.choice(resumed=resumed, name="a card", device="cuda", limit=limit).plan()
    assert (found.key != "new") == kept


def test_what_is_free_on_a_cpu_changes_all_the_time_and_no_plan(desk, fits, plan):
    plan.save(desk.run.plan())
    assert desk.choice(resumed=desk.made_for(), limit=MiB).plan() == plan


def test_a_resumed_run_without_a_plan_is_fitted(desk, fits):
    assert desk.choice(resumed=desk.made_for()).plan().key == "new"


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_damaged_plan_of_a_resumed_run_is_made_anew(desk, fits, content):
    desk.run.plan().write_text(content)
    assert desk.choice(resumed=desk.made_for()).plan().key == "new"


def test_processes_on_equal_devices_share_the_first_ones_plan(desk, fits):
    found = Team().run(lambda rank, group: desk.planned(group=group))
    assert [one.key for one in found] == ["new", "new"]
    assert len(fits) == 1
    assert not (desk.run.root / "plan-1.json").exists()


def test_processes_on_unlike_devices_have_a_plan_each(desk, fits):
    names = ["a large card", "a small card", "a large card"]
    Team(3).run(lambda rank, group: desk.planned(group=group, name=names[rank]))
    assert len(fits) == 2
    assert sorted(path.name for path in desk.run.root.glob("*.json")) == ["plan-1.json", "plan.json"]
    assert sorted(path.name for path in desk.run.plans.iterdir()) == ["0001.json", "rank-1-0001.json"]


def saved(desk, plan, *, new_run=False, rank_plans=None, **changes):
    """The number under which a plan with these changes is kept, the same on every rank."""

    def save(rank, group):
        mine = replace(plan, **changes, **(rank_plans[rank] if rank_plans else {}))
        choice = desk.choice(group=group)
        request = Request(task="tagger", data=None, run=str(desk.run.root))
        return choice.save(mine, choice.kept(mine, request), new_run=new_run).number

    numbers = Team(len(rank_plans) if rank_plans else 1).run(save)
    assert len(set(numbers)) == 1
    return numbers[0]


def kept_names(desk):
    return sorted(path.name for path in desk.run.plans.iterdir())


def other(plan, name, effective, requested=None):
    """The choices of a plan with one more."""
    return (*plan.choices, Choice.of(name, requested, effective, "", "measured"))


def test_a_plan_that_was_only_made_again_keeps_its_number(desk, plan):
    assert saved(desk, plan, new_run=True) == 1
    again = {"plan_s": 99.0, "created": "later", "rows_per_s": 1.0, "warnings": ("late",), "cached": True}
    assert saved(desk, plan, **again) == 1
    assert kept_names(desk) == ["0001.json"]


def test_a_plan_that_differs_has_the_next_number_and_the_former_stays(desk, plan):
    saved(desk, plan, new_run=True)
    assert saved(desk, plan, choices=other(plan, "micro_batch", 7)) == 2
    assert saved(desk, plan, choices=other(plan, "micro_batch", 6)) == 3
    assert kept_names(desk) == ["0001.json", "0002.json", "0003.json"]
    assert [Plan.load(path).number for path in desk.run.kept_plans()] == [1, 2, 3]
    assert Plan.load(desk.run.plan()).choice("micro_batch").effective == 6


def test_a_plan_that_the_run_had_before_has_its_former_number(desk, plan):
    saved(desk, plan, new_run=True)
    saved(desk, plan, choices=other(plan, "micro_batch", 7))
    assert saved(desk, plan) == 1
    assert Plan.load(desk.run.plan()).number == 1
    assert kept_names(desk) == ["0001.json", "0002.json"]


def test_a_ceiling_of_the_same_size_is_another_plan(desk, plan):
    """Rows of other lengths are split by it."""
    saved(desk, plan, new_run=True, choices=other(plan, "micro_batch", 7))
    assert saved(desk, plan, choices=other(plan, "micro_batch", 7, requested=7)) == 2


def test_what_happens_to_be_free_is_no_difference(desk, plan):
    saved(desk, plan, new_run=True, choices=other(plan, "memory_limit", 4 * MiB))
    assert saved(desk, plan, choices=other(plan, "memory_limit", 5 * MiB)) == 1
    assert saved(desk, plan, choices=other(plan, "memory_limit", 5 * MiB, requested=5 * MiB)) == 2


def test_a_new_run_forgets_the_plans_of_one_that_never_trained(desk, plan):
    saved(desk, plan, new_run=True)
    saved(desk, plan, choices=other(plan, "micro_batch", 7))
    assert saved(desk, plan, new_run=True, choices=other(plan, "micro_batch", 5)) == 1
    assert kept_names(desk) == ["0001.json"]


def test_a_change_on_one_of_unlike_devices_is_a_new_plan_for_all(desk, plan):
    ranks = [{"key": "large"}, {"key": "small"}]
    assert saved(desk, plan, new_run=True, rank_plans=ranks) == 1
    assert saved(desk, plan, rank_plans=ranks) == 1
    assert saved(desk, plan, rank_plans=[ranks[0], {**ranks[1], "choices": other(plan, "micro_batch", 7)}]) == 2
    assert kept_names(desk) == ["0001.json", "0002.json", "rank-1-0001.json", "rank-1-0002.json"]


def test_a_run_goes_back_to_a_kept_plan(desk, fits, plan):
    saved(desk, plan, new_run=True)
    saved(desk, plan, choices=other(plan, "micro_batch", 7))
    assert desk.choice(resumed=desk.made_for(), number=1).plan() == replace(plan, number=1)
    assert not fits and not desk.notes


def test_going_back_with_other_options_makes_a_new_plan(desk, fits, plan):
    saved(desk, plan, new_run=True)
    assert desk.choice(resumed=desk.made_for(), number=1, global_batch=7).plan().key == "new"


def test_each_process_knows_what_all_found():
    found = Team().run(lambda rank, group: gather_results(group, lambda: rank * 10))
    assert found == [[0, 10], [0, 10]]


def test_what_the_first_found_is_everybodys():
    worked = []
    found = Team(3).run(lambda rank, group: on_rank_zero(group, lambda: worked.append(rank) or f"by {rank}"))
    assert found == ["by 0"] * 3 and worked == [0]


def test_the_mistake_that_one_process_met_is_everybodys():
    def work():
        raise BadData("rows.jsonl is empty")

    first, second = Team().run(lambda rank, group: on_rank_zero(group, work))
    assert type(first) is BadData and isinstance(second, UserError)
    assert str(first) == str(second) == "rows.jsonl is empty"


def test_alone_a_mistake_is_raised_as_it_is():
    def work():
        raise BadData("rows.jsonl is empty")

    with pytest.raises(BadData):
        on_rank_zero(SingleProcess(), work)
