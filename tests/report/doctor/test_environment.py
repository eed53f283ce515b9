"""Variables that do nothing or hurt, one value at a time."""

from pathlib import Path

import pytest

from brimful.report.doctor.software import RULES, Surrounding, environment_checks, hub_cache
from tests.report.doctor.fake_machine import only


def check(tmp_path, cores=8, cards=2, nvidia_cards=2, **variables):
    here = Surrounding(
        cores=cores, cards=cards, nvidia_cards=nvidia_cards, variables={"HOME": "/x", **variables}, hub_cache=tmp_path / "hub"
    )  # fmt: skip
    return only(environment_checks(here))


BAD = {
    "ACCELERATE_USE_GLOO": ("1", "--backend gloo"),
    "NCCL_TIMEOUT": ("1800", "unset NCCL_TIMEOUT"),
    "TORCH_USE_CUDA_DSA": ("1", "unset TORCH_USE_CUDA_DSA"),
    "TRANSFORMERS_CACHE": ("/x", "HF_HOME"),
    "HF_HUB_ENABLE_HF_TRANSFER": ("1", "HF_XET_HIGH_PERFORMANCE"),
    "NCCL_BLOCKING_WAIT": ("1", "TORCH_NCCL_BLOCKING_WAIT"),
    "NCCL_ASYNC_ERROR_HANDLING": ("1", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "CUDA_LAUNCH_BLOCKING": ("1", "unset CUDA_LAUNCH_BLOCKING"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "unset"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "unset"),
    "TORCHDYNAMO_DISABLE": ("1", "unset"),
    "TORCH_COMPILE_DISABLE": ("1", "unset"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("1", "unset"),
    "CUDA_CACHE_DISABLE": ("1", "unset"),
    "CUDA_MODULE_LOADING": ("EAGER", "unset"),
    "NVIDIA_TF32_OVERRIDE": ("0", "unset"),
    "NCCL_P2P_DISABLE": ("1", "brimful doctor"),
    "NCCL_SHM_DISABLE": ("1", "brimful doctor"),
    "NCCL_IB_DISABLE": ("1", "brimful doctor"),
    "NCCL_DEBUG": ("INFO", "unset"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "unset"),
    "OMP_NUM_THREADS": ("1", "OMP_NUM_THREADS=8"),
    "MKL_NUM_THREADS": ("64", "MKL_NUM_THREADS=8"),
    "TOKENIZERS_PARALLELISM": ("false", "unset"),
    "CUDA_VISIBLE_DEVICES": ("", "unset CUDA_VISIBLE_DEVICES"),
    "PYTORCH_CUDA_ALLOC_CONF": ("max_split_size_mb:128", "expandable_segments:True"),
    "PYTORCH_ALLOC_CONF": ("expandable_segment:True", "expandable_segments"),
    "HF_HUB_OFFLINE": ("1", "hf download"),
    "TRANSFORMERS_OFFLINE": ("1", "hf download"),
    "WORLD_SIZE": ("4", "unset RANK"),
}
"""For each rule a value that it finds, and words of its advice."""
GOOD = {
    "CUDA_LAUNCH_BLOCKING": "0",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCHDYNAMO_DISABLE": "0",
    "TORCH_COMPILE_DISABLE": "",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
    "CUDA_CACHE_DISABLE": "0",
    "CUDA_MODULE_LOADING": "LAZY",
    "NVIDIA_TF32_OVERRIDE": "1",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_SHM_DISABLE": "0",
    "NCCL_IB_DISABLE": "0",
    "NCCL_DEBUG": "WARN",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "OMP_NUM_THREADS": "8",
    "MKL_NUM_THREADS": "4",
    "TOKENIZERS_PARALLELISM": "true",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,512:2]",
    "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync",
    "HF_HUB_OFFLINE": "0",
    "TRANSFORMERS_OFFLINE": "0",
    "WORLD_SIZE": "1",
}
"""Values of the same variables that are fine."""


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_does_nothing_or_hurts_is_found_with_what_to_do(tmp_path, name):
    value, advice = BAD[name]
    found = check(tmp_path, **{name: value})
    assert str(found.name) == name and found.status in ("warning", "failed")
    assert advice in str(found.fix)


@pytest.mark.parametrize("name", GOOD)
def test_a_value_that_is_fine_is_not_mentioned(tmp_path, name):
    assert check(tmp_path, **{name: GOOD[name]}).status == "ok"


def test_every_rule_is_tested():
    assert set(RULES) == set(BAD) | {"LD_LIBRARY_PATH"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PYTORCH_CUDA_ALOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISABLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("TOKENIZER_PARALLELISM", "TOKENIZERS_PARALLELISM"),
        ("BRIMFUL_LANGUAGE", None),
    ],
)
def test_a_misspelt_name_does_nothing(tmp_path, name, meant):
    found = check(tmp_path, **{name: "1"})
    assert found.status == "warning" and "does nothing" in str(found.text)
    assert (meant or "unset") in str(found.fix)


@pytest.mark.parametrize(
    "name",
    ["NCCL_NET_GDR_LEVEL", "NCCL_P2P_LEVEL", "CUDA_HOME", "CUDA_VERSION", "NV_CUDA_LIB_VERSION", "HF_HUB_CACHE", "OMP_STACKSIZE",
     "NVIDIA_DRIVER_CAPABILITIES", "NCCL_VERSION", "TORCH_HOME", "NCCL_NVLS_ENABLE", "CUDA_PATH"],
)  # fmt: skip
def test_a_real_name_is_not_taken_for_a_misspelt_one(tmp_path, name):
    assert check(tmp_path, **{name: "1"}).status == "ok"


def test_hidden_cards_fail_only_where_there_are_cards(tmp_path):
    assert check(tmp_path, CUDA_VISIBLE_DEVICES="-1").status == "failed"
    assert check(tmp_path, CUDA_VISIBLE_DEVICES="", nvidia_cards=0, cards=0).status == "ok"


def test_a_number_without_a_card_is_a_warning(tmp_path):
    assert "no card 5" in str(check(tmp_path, CUDA_VISIBLE_DEVICES="0,5").text)


def test_an_allocator_option_that_torch_refuses_fails(tmp_path):
    assert check(tmp_path, PYTORCH_ALLOC_CONF="expandable_segment:True").status == "failed"


def test_workarounds_for_several_cards_are_fine_with_one(tmp_path):
    assert check(tmp_path, cards=1, NCCL_P2P_DISABLE="1").status == "ok"


def test_one_thread_is_fine_on_two_cores(tmp_path):
    assert check(tmp_path, cores=2, OMP_NUM_THREADS="1").status == "ok"


def test_a_number_of_threads_that_is_none_is_a_warning(tmp_path):
    assert "many is not a number" in str(check(tmp_path, OMP_NUM_THREADS="many").text)


def test_offline_with_a_model_in_the_cache_is_fine(tmp_path):
    (tmp_path / "hub/models--owner--name").mkdir(parents=True)
    assert check(tmp_path, HF_HUB_OFFLINE="1").status == "ok"


def test_ranks_left_over_from_a_launcher_fail(tmp_path):
    here = Surrounding(
        cores=8, cards=0, nvidia_cards=0, variables={"WORLD_SIZE": "2", "RANK": "0"}, hub_cache=tmp_path
    )  # fmt: skip
    assert only(environment_checks(here)).status == "failed"


def test_libraries_that_shadow_torchs_own_are_a_warning(tmp_path):
    (tmp_path / "libcudnn.so.8").touch()
    found = check(tmp_path, LD_LIBRARY_PATH=f"/nowhere:{tmp_path}")
    assert found.status == "warning" and "libcudnn.so" in str(found.text)
    assert check(tmp_path, LD_LIBRARY_PATH="/nowhere").status == "ok"


def test_the_cache_of_the_hub_follows_its_variables():
    assert hub_cache({"HF_HOME": "/a"}) == Path("/a/hub")
    assert hub_cache({"HF_HUB_CACHE": "/b", "HF_HOME": "/a"}) == Path("/b")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
