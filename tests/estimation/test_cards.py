"""A card is found however its name is written."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from brimful.errors import BadOption
from brimful.estimation.cards import CARDS, CONTEXT_BYTES, all_cards, find_card
from brimful.units import GiB, show_bytes


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        ("A100-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("H100 80GB HBM3", "H100"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("rtx 6000 ada generation", "RTX 6000 Ada"),
    ],
)
def test_a_card_is_found_by_what_drivers_and_people_call_it(written, name):
    assert find_card(written).name == name


def test_every_card_is_found_by_its_own_name():
    assert [find_card(card.name) for card in CARDS] == list(CARDS)


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("RTX 4099", "RTX 4090"),
        ("H300", "H200"),
        ("A100", "A100 40GB, A100 80GB"),
        ("V100", "V100 16GB"),
        ("RTX 5060", "RTX 5060 Ti 16GB"),
    ],
)
def test_an_unknown_or_ambiguous_name_lists_near_matches(written, near):
    with pytest.raises(BadOption, match="Try:") as caught:
        find_card(written)
    assert near in str(caught.value) and repr(written) in str(caught.value)


def test_a_name_like_no_other_says_where_all_are_listed():
    with pytest.raises(BadOption, match='gpu="all"'):
        find_card("£££")


def test_the_gpu_of_this_machine_has_its_own_multiprocessors(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    properties = SimpleNamespace(
        name="NVIDIA L4", total_memory=22 * GiB, major=8, minor=9, multi_processor_count=58, max_threads_per_multi_processor=1536
    )  # fmt: skip
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    assert find_card(None).processors == (58, 1536) == find_card("L4").processors


def test_memory_without_a_card_is_all_for_torch():
    card = find_card(None, "24GiB")
    assert card.limit_bytes == 24 * GiB and not card.known


def test_without_a_gpu_a_card_must_be_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BadOption, match="gpu= is needed"):
        find_card(None)


def test_cards_are_listed_by_memory_and_have_less_than_the_box_says():
    cards = all_cards()
    assert [card.limit_bytes for card in cards] == sorted(card.limit_bytes for card in cards)
    assert find_card("RTX 3060") in cards and find_card("H200") in cards and find_card("MI300X") in cards
    for name, box in (("RTX 4090", 24), ("H200", 141), ("A100 80GB", 80)):
        assert box * 0.95 < find_card(name).total_bytes / GiB < box


def test_what_torch_may_reserve_is_without_the_context():
    card = find_card("H200")
    assert card.limit_bytes == card.total_bytes - card.context_bytes
    assert card.context_bytes == CONTEXT_BYTES  # as measured


def test_flash_attention_begins_with_ampere():
    assert not find_card("T4").has_flash and not find_card("V100 32GB").has_flash
    assert find_card("RTX 3060").has_flash and find_card("A100 40GB").has_flash


def test_the_page_lists_every_card():
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text(encoding="utf-8")
    for card in CARDS:
        assert f"| {card.name} | {show_bytes(card.total_bytes)} | {show_bytes(card.limit_bytes)} |" in page


def test_memory_without_a_unit_is_refused():
    with pytest.raises(BadOption, match=r"memory=24 is 24 B, which no GPU has"):
        find_card(None, "24")
