"""Answers of causal models: the same in any batch, ended by any end of a turn, within the memory limit."""

import pytest
import torch

from brimful.memory.forward import Forward, eval_mode
from brimful.memory.ledger import simulated_memory
from brimful.tasks.generate import GenerateOptions, Generator, OwnNoise, seed_of, weights_dtype
from brimful.tasks.model_folder import tokenizer_of
from brimful.units import KiB
from tests.tasks.tiny import make_model
from tests.tasks.tiny_causal import CONVERSATIONS, make_causal, make_config

CPU = torch.device("cpu")
ANSWERS = [one[-1]["content"] for one in CONVERSATIONS]
FAMILIES = ["qwen2", "llama", "gemma3_text", "mistral", "gpt2"]
"""With full and sliding attention, and with positions that are learned."""


def generator(causal, model=None, **options):
    chosen = GenerateOptions(**{"max_new_tokens": 12, **options})
    ends = causal.template.end_ids
    return Generator(
        causal.net if model is None else model, tokenizer_of(causal.model), chosen, device=CPU, end_ids=ends
    )


def random_prompts(*lengths):
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(2, 385, (length,), generator=rng).tolist() for length in lengths]


def batched(made, prompts, **options):
    forward = Forward(made.dummy, made.model, CPU, what="generation", **options)
    with eval_mode(made.model, CPU):
        return made.answers(prompts, forward), forward


def test_the_model_of_these_tests_answers_correctly(causal):
    made = generator(causal)
    answers, forward = batched(made, causal.prompts(), fewest_batches=True)
    assert [made.tokenizer.decode(ids) for ids in answers] == ANSWERS
    assert forward.batches == 1


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_batch_gives_the_same_answers_as_single_prompts(causal, kind):
    """Some are longer than the window of 8 tokens. Answers vary: a model that repeats one token would hide a mistake."""
    made = generator(
        causal,
        make_causal(kind, 385, torch.float64, initializer_range=0.3, tie_word_embeddings=False),
        max_new_tokens=20,
    )
    prompts = random_prompts(3, 7, 12, 20, 31, 1)
    answers = made.answer_batch(prompts)
    assert answers == [made.answer_batch([prompt])[0] for prompt in prompts]
    assert max(len(set(answer)) for answer in answers) > 10


@pytest.mark.parametrize("options", [{"repetition_penalty": 9.0}, {"beams": 3}], ids=str)
def test_padding_counts_in_no_way_of_decoding(causal, options):
    """Tied weights make a model repeat the last token of its prompt, unless that counts as generated already."""
    model = make_causal("gemma3_text", 385, torch.float64, initializer_range=0.3, tie_word_embeddings=True)
    made, prompts = generator(causal, model, max_new_tokens=8, **options), random_prompts(2, 9, 17)
    answers = made.answer_batch(prompts)
    assert answers == [made.answer_batch([prompt])[0] for prompt in prompts]
    if "beams" not in options:
        assert [answer[0] for answer in answers] == [prompt[-1] for prompt in prompts]


def test_an_answer_ends_at_any_end_of_a_turn(causal):
    made, prompt = generator(causal), causal.prompts()[0]
    whole = made.answer_batch([prompt])[0]
    made.end_ids = (*made.end_ids, whole[1])
    assert made.answer_batch([prompt])[0] == whole[:1]


def test_sampling_defaults_of_the_models_own_are_not_used(causal):
    """Hub models come with a temperature and a repetition penalty in generation_config.json."""
    model = make_causal("qwen2", 385, initializer_range=0.3)
    expected = generator(causal, model).answer_batch(random_prompts(5, 9))
    model.generation_config.update(do_sample=True, temperature=9.0, top_k=5, repetition_penalty=2.0, max_length=6)
    assert generator(causal, model).answer_batch(random_prompts(5, 9)) == expected


def test_sampling_follows_the_seed(causal):
    def sampled(seed):
        made = generator(causal, temperature=5.0, seed=seed)
        return made.answer_batch(causal.prompts()[:2])

    first, again, other = sampled(1), sampled(1), sampled(2)
    assert first == again != other


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_sampled_answer_does_not_depend_on_its_batch(causal, top_p):
    model = make_causal("qwen2", 385, torch.float64, initializer_range=0.3, tie_word_embeddings=False)
    made, prompts = (
        generator(causal, model, max_new_tokens=20, temperature=1.0, top_p=top_p),
        random_prompts(3, 7, 31, 1, 12),
    )
    answers = made.answer_batch(prompts)
    assert answers == [made.answer_batch([prompt])[0] for prompt in prompts]
    assert answers == [*made.answer_batch(prompts[:2]), *made.answer_batch(prompts[2:])]
    assert answers != generator(causal, model, max_new_tokens=20).answer_batch(prompts), "greedy"


def test_noise_of_its_own_samples_from_the_softmax():
    scores = torch.tensor([2.0, 1.0, 0.0, -float("inf")])
    drawn = OwnNoise(range(20_000), CPU)(torch.empty(0), scores.repeat(20_000, 1)).argmax(-1)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    assert shares.tolist() == pytest.approx(scores.softmax(-1).tolist(), abs=0.015)


def test_every_prompt_has_a_seed_of_its_own():
    prompts = [[1], [1, 2], [12], [2, 1]]
    assert len({seed_of(seed, prompt) for seed in (0, 1) for prompt in prompts}) == 8


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_no_answer_goes_beyond_the_context(causal, kind):
    sizes = {"n_positions": 16} if kind == "gpt2" else {"max_position_embeddings": 16}
    made = generator(causal, make_causal(kind, 385, **sizes), max_new_tokens=9)
    made.end_ids = (10**9,)
    prompts = random_prompts(4, 12, 16, 2, 20)
    answers = made.answer_batch(prompts)
    assert [len(answer) for answer in answers] == [9, 4, 0, 9, 0]


@pytest.mark.parametrize(("source", "new"), [(96, 2), (24, 160)], ids=["prefill", "decoding"])
def test_the_memory_of_generation_is_predicted_from_shorter_ones(causal, source, new):
    """With few new tokens the prefill sets the peak, which says nothing about the cache that grows with many."""
    made = generator(causal)
    model = Forward(made.dummy, causal.net, CPU).fit((48, 8))
    assert set(model.phases) == {"forward", "decoding", "choosing"}
    with simulated_memory("1GiB") as memory, eval_mode(causal.net, CPU):
        memory.adopt(causal.net.parameters())
        before = memory.live_bytes
        made.dummy(16, (source, new))
    assert model.peak_bytes(16, (source, new)) == pytest.approx(memory.peak_bytes - before, rel=0.1)


def test_a_memory_limit_makes_more_batches_and_changes_no_answer(causal):
    made = generator(causal)
    expected, _ = batched(made, causal.prompts())
    with simulated_memory(causal.weight_bytes + 300 * KiB) as memory:
        memory.adopt(causal.net.parameters())
        answers, forward = batched(made, causal.prompts(), fewest_batches=True)
    assert answers == expected
    assert forward.batches > 1 and memory.ooms == 0


def test_out_of_memory_while_generating_is_survived_with_the_same_answers(causal, monkeypatch):
    """The probes are replaced by the smallest one, so the memory model predicts too little."""
    made, notes = generator(causal), []
    expected, _ = batched(made, causal.prompts())
    monkeypatch.setattr(made, "dummy", lambda rows, shape: Generator.dummy(made, 1, (2, 1)))
    with simulated_memory(causal.weight_bytes + 300 * KiB) as memory:
        memory.adopt(causal.net.parameters())
        answers, forward = batched(made, causal.prompts(), fewest_batches=True, note=notes.append)
    assert answers == expected
    assert forward.ooms == memory.ooms == len(notes) > 0


def test_weights_stay_as_they_were_saved_on_an_accelerator():
    bf16 = make_config("qwen2", dtype=torch.bfloat16)
    assert weights_dtype(bf16, torch.device("cuda")) is torch.bfloat16
    assert weights_dtype(bf16, CPU) is None
    assert weights_dtype(make_model().config, torch.device("cuda")) is None
