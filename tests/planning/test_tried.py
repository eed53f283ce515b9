"""A plan keeps what its search timed; `table=True` tries every lever and chooses the fastest that is allowed."""

import pytest
import torch

from brimful.planning.plan import Plan
from brimful.planning.speed import Speed, Timing
from tests.planning.clock import Clock
from tests.planning.small import Tagger, Texts, small_plan, texts


class Packable(Texts):
    """Rows that may lie end to end, because the model looks at tokens one by one."""

    name = "packable"

    def pack(self, rows, tokens):
        fill = torch.full((tokens[0] - sum(map(len, rows)),), -1)
        return torch.cat([*rows, fill])[None]


ROWS = texts(*range(4, 64))


def by_setting(plan):
    return {str(one.setting): one for one in reversed(plan.tried)}


@pytest.fixture
def speeds(monkeypatch):
    """Trials that follow each other have these rows/s, at the largest size alone."""

    def use(*rows_per_s):
        rates = iter(rows_per_s)

        def fastest(step_rows, largest, *_, **__):
            timing = Timing(largest, -(-step_rows // largest), next(rates), 0.1)
            return Speed(timing, (timing,))

        monkeypatch.setattr("brimful.planning.micro_batch.find_fastest", fastest)

    return use


@pytest.fixture
def bf16_is_fast(monkeypatch):
    def dtype(precision, device):
        return None if precision == "fp32" else torch.bfloat16

    monkeypatch.setattr("brimful.planning.micro_batch.autocast_dtype", dtype)


def test_every_size_that_was_timed_is_kept_and_one_is_chosen(tagger_plan):
    (chosen,) = (one for one in tagger_plan.tried if one.chosen)
    assert len(tagger_plan.tried) > 1
    assert (chosen.micro_batch, chosen.accumulation) == (tagger_plan.micro_batch, tagger_plan.accumulation)
    assert (chosen.peak_bytes, chosen.basis) == (tagger_plan.measured_peak_bytes, "measured")
    assert (chosen.rows_per_s, chosen.step_s) == (tagger_plan.rows_per_s, pytest.approx(50 / tagger_plan.rows_per_s))


def test_the_fastest_comes_first(tagger_plan):
    rates = [one.rate for one in tagger_plan.tried]
    assert rates == sorted(rates, reverse=True)


def test_without_a_table_only_what_the_search_needs_is_tried():
    plan = small_plan(memory_limit="64MiB")
    assert {str(one.setting) for one in plan.tried} == {"padded fp32"}


def test_it_is_saved_with_the_plan(tmp_path):
    plan = small_plan(Packable(), data=ROWS, table=True)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_what_does_not_fit_says_what_it_needs():
    plan = small_plan(micro_batch=28, global_batch=500)
    plain = by_setting(plan)["padded fp32"]
    assert (plain.micro_batch, plain.fits, plain.rows_per_s, plain.basis) == (28, False, None, "predicted")
    assert plain.peak_bytes > plan.limit_bytes
    assert by_setting(plan)["padded fp32 checkpointed"].chosen


def test_a_table_compares_checkpointing_and_layouts():
    plan = small_plan(Packable(), data=ROWS, table=True)
    assert set(by_setting(plan)) == {
        "padded fp32", "padded fp32 checkpointed", "packed fp32", "packed fp32 checkpointed",
    }  # fmt: skip
    assert plan.not_tried == ()


def test_a_packed_micro_batch_has_tokens():
    tried = by_setting(small_plan(Packable(), data=ROWS, table=True))
    packed, padded = tried["packed fp32"], tried["padded fp32"]
    assert packed.tokens == (packed.micro_batch * packed.shape[0],) and packed.shape < padded.shape == (63,)
    assert padded.tokens is None


def test_layouts_are_compared_by_their_speed_on_the_data():
    plan = small_plan(Packable(), data=ROWS, table=True, plan_seconds=1000)
    on_data = {str(one.setting) for one in plan.tried if one.data_rows_per_s}
    assert on_data == set(by_setting(plan)) and plan.data_rows == len(ROWS)
    packed = [one for one in plan.tried if one.setting.layout == "packed"]
    assert all(one.data_rows_per_s == one.rows_per_s for one in packed)


def test_a_layout_that_is_not_exact_is_not_in_the_table():
    class Leaky(Packable):
        def pack(self, rows, tokens):
            return super().pack(rows, tokens).flip(0).cumsum(1) % 90

    assert set(by_setting(small_plan(Leaky(), data=ROWS, table=True))) == {"padded fp32", "padded fp32 checkpointed"}


def test_the_fastest_setting_is_chosen_with_its_reason(speeds):
    speeds(100.0, 200.0)
    plan = small_plan(memory_limit="64MiB", table=True)
    assert (plan.levers.checkpointing, plan.rows_per_s) == ("on", 200.0)
    choice = plan.choice("checkpointing")
    assert choice.reason == "fastest of 2 settings: 200 rows/s padded fp32 checkpointed, 100 padded fp32"
    assert choice.basis == "measured"


def test_the_layout_is_chosen_the_same_way(speeds):
    speeds(100.0, 90.0, 200.0, 80.0)
    plan = small_plan(PackableDummies(), table=True)
    assert (plan.layout, plan.rows_per_s) == ("packed", 200.0)
    assert "200 rows/s packed fp32, 100 padded fp32" in plan.choice("layout").reason


def test_a_micro_batch_of_the_users_beyond_the_budget_is_compared_at_that_size():
    plan = small_plan(micro_batch=1, memory_limit="530KiB", global_batch=16, table=True)
    assert plan.largest_micro_batch == 0
    assert [(one.micro_batch, one.fits) for one in plan.tried] == [(1, True), (1, True)]


def test_a_setting_that_is_hardly_faster_is_not(speeds):
    speeds(100.0, 101.0)
    assert small_plan(memory_limit="64MiB", table=True).levers.checkpointing == "off"


def test_what_the_user_set_stays_and_the_other_is_for_comparison(speeds):
    speeds(100.0, 200.0)
    plan = small_plan(memory_limit="64MiB", table=True, checkpointing="off")
    assert plan.levers.checkpointing == "off"
    other = by_setting(plan)["padded fp32 checkpointed"]
    assert (other.rows_per_s, other.allowed, other.chosen) == (200.0, False, False)


def test_in_a_deterministic_plan_the_table_decides_nothing(speeds):
    speeds(100.0, 200.0)
    plan = small_plan(memory_limit="64MiB", table=True, deterministic=True)
    assert plan.levers.checkpointing == "off" and len(plan.tried) == 2


def test_the_precision_is_compared_and_never_changed(speeds, bf16_is_fast):
    speeds(*(100.0 + 100 * number for number in range(4)))
    plan = small_plan(memory_limit="64MiB", table=True)
    assert plan.levers.precision == "fp32"
    assert not by_setting(plan)["padded bf16"].allowed
    assert plan.levers.checkpointing == "on"


def test_a_setting_that_fails_is_left_out_with_the_reason(bf16_is_fast):
    class Picky(Tagger):
        name = "picky"

        def loss(self, model, batch):
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("no bf16 here")
            return super().loss(model, batch)

    plan = small_plan(Picky(), table=True)
    assert [reason.partition(":")[0] for reason in plan.not_tried] == ["padded bf16", "padded bf16 checkpointed"]
    assert "no bf16 here" in plan.not_tried[0]


def test_what_there_was_no_time_for_is_said(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("brimful.planning.plan_time.time", clock)

    class Slow(Tagger):
        def loss(self, model, batch):
            clock.seconds += 0.05 * len(batch["ids"])
            return super().loss(model, batch)

    plan = small_plan(Slow(), table=True, plan_seconds=5)
    assert plan.not_tried == ("padded fp32 checkpointed: no time left",)
    assert "padded fp32 checkpointed" in plan.choice("plan_seconds").reason


def test_a_table_leaves_the_model_as_it_was():
    model = Tagger().model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small_plan(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), table=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(part) for part in model.modules())


class PackableDummies(Packable):
    """Without data both layouts are planned for the same rows."""

    worst_shape = (32,)

    def dummy_row(self, shape):
        return torch.randint(0, 100, shape)
