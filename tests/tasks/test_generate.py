"""Answers: the same in any batch, ended by the tokenizer's eos, within the memory limit."""

import random

import pytest
import torch

from brimful.errors import BadModel, BadOption
from brimful.memory.forward import Forward, eval_mode
from brimful.memory.ledger import simulated_memory
from brimful.tasks.generate import GenerateOptions, Generator
from brimful.tasks.model_folder import tokenizer_of
from brimful.units import KiB
from tests.tasks.tiny import ROWS, make_model

CPU = torch.device("cpu")


def generator(tiny, **options):
    chosen = GenerateOptions(**{"max_new_tokens": 16, **options})
    return Generator(tiny.net, tokenizer_of(tiny.model), chosen, device=CPU)


_memory_models = {}


def batched(made, prompts, *, probe=False, **options):
    """The answers. Memory models are shared by all tests of one kind of decoding, unless `probe` is set."""
    forward = Forward(made.dummy, made.model, CPU, what="generation", **options)
    if not probe:
        if made.options.beams not in _memory_models:
            _memory_models[made.options.beams] = forward.fit((17, 8))
        forward.model = _memory_models[made.options.beams]
    with eval_mode(made.model, CPU):
        return made.answers(prompts, forward), forward


def test_the_model_of_these_tests_answers_correctly(tiny):
    made = generator(tiny)
    answers, _ = batched(made, tiny.prompts())
    right = [made.tokenizer.decode(ids) for ids in answers]
    assert right == [row["response"].replace("，", ",") for row in ROWS]  # the tokenizer's normalisation


@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_a_batch_gives_the_same_answers_as_single_prompts(tiny, options):
    made, prompts = generator(tiny, **options), tiny.prompts()[:6]
    answers, forward = batched(made, prompts, fewest_batches=True)
    assert forward.batches == 1
    with eval_mode(made.model, CPU):
        assert answers == [made.answer_batch([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_decoder_may_have_more_layers_than_the_encoder(tiny, beams):
    deep = make_model(tiny.net.config.vocab_size, num_layers=1, num_decoder_layers=2).eval()
    made = Generator(deep, tokenizer_of(tiny.model), GenerateOptions(max_new_tokens=5, beams=beams), device=CPU)
    made.end_ids = (10**9,)
    ids = torch.tensor([[5, 9, 17, 30]])
    uncached = deep.generate(
        ids, use_cache=False, num_beams=beams, max_new_tokens=5, min_new_tokens=5, eos_token_id=None,
        decoder_start_token_id=made.start_id,
    )  # fmt: skip
    assert made.answer_batch(ids.tolist()) == [uncached[0, 1:].tolist()]


def test_an_answer_ends_at_the_tokenizers_eos_not_the_models(tiny):
    made = generator(tiny, max_new_tokens=40)
    expected, _ = batched(made, tiny.prompts()[:4])
    assert all(len(answer) < 15 for answer in expected)
    wrong = make_model(tiny.net.config.vocab_size)
    wrong.load_state_dict(tiny.net.state_dict())
    wrong.config.eos_token_id = wrong.generation_config.eos_token_id = 300
    passes = []
    wrong.decoder.register_forward_pre_hook(lambda module, args: passes.append(1))
    other = Generator(wrong.eval(), made.tokenizer, made.options, device=CPU)
    assert batched(other, tiny.prompts()[:4])[0] == expected
    assert len(passes) == 1 + max(map(len, expected)), "it went on after the end"


def test_an_answer_without_an_end_stops_at_the_limit(tiny):
    answers, _ = batched(generator(tiny, max_new_tokens=2), tiny.prompts()[:3])
    assert [len(answer) for answer in answers] == [2, 2, 2]


def test_a_cache_is_used_although_the_config_has_it_off(tiny):
    assert tiny.net.config.use_cache is False
    seen = []
    hook = tiny.net.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        batched(generator(tiny), tiny.prompts()[:2])
    finally:
        hook.remove()
    assert set(seen) == {1}


def test_a_memory_limit_makes_more_batches_and_changes_no_answer(tiny):
    made = generator(tiny)
    expected, _ = batched(made, tiny.prompts())
    with simulated_memory(250 * KiB) as memory:
        memory.adopt(tiny.net.parameters())
        answers, forward = batched(made, tiny.prompts(), probe=True, fewest_batches=True)
    assert answers == expected
    assert forward.batches > 1 and memory.ooms == 0


def test_out_of_memory_while_generating_is_survived_with_the_same_answers(tiny, monkeypatch):
    """The probes are replaced by the smallest one, so the memory model predicts too little."""
    made, notes = generator(tiny), []
    expected, _ = batched(made, tiny.prompts())
    monkeypatch.setattr(made, "dummy", lambda rows, shape: Generator.dummy(made, 1, (1, 1)))
    with simulated_memory(220 * KiB) as memory:
        memory.adopt(tiny.net.parameters())
        answers, forward = batched(made, tiny.prompts(), probe=True, fewest_batches=True, note=notes.append)
    assert answers == expected
    assert forward.ooms == memory.ooms == len(notes) > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_the_memory_of_generation_is_predicted_from_shorter_ones(tiny, beams):
    made = generator(tiny, beams=beams)
    forward = Forward(made.dummy, tiny.net, CPU)
    model = forward.fit((17, 8))
    with simulated_memory("1GiB") as memory, eval_mode(tiny.net, CPU):
        memory.adopt(tiny.net.parameters())
        before = memory.live_bytes
        made.dummy(24, (17, 32))
    assert model.peak_bytes(24, (17, 32)) == pytest.approx(memory.peak_bytes - before, rel=0.1)


def test_random_state_is_left_alone(tiny):
    before = torch.get_rng_state(), random.getstate()
    batched(generator(tiny, temperature=0.8), tiny.prompts()[:3], probe=True)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_beam_search_differs_from_greedy_decoding(tiny):
    """Several sequences at once find one that is likelier as a whole."""
    untrained = make_model(tiny.net.config.vocab_size).eval()
    tokenizer, prompts = tokenizer_of(tiny.model), tiny.prompts()[:3]
    greedy, beams = [
        Generator(untrained, tokenizer, GenerateOptions(max_new_tokens=4, beams=n), device=CPU) for n in (1, 8)
    ]
    assert greedy.answer_batch(prompts) != beams.answer_batch(prompts)


def test_sampling_follows_the_seed(tiny):
    def sampled(seed):
        made = generator(tiny, temperature=5.0, seed=seed)
        return batched(made, tiny.prompts()[:2])[0]

    first, again, other = sampled(1), sampled(1), sampled(2)
    assert first == again != other


def test_a_tiny_top_p_is_greedy(tiny):
    greedy, almost = generator(tiny), generator(tiny, temperature=1.0, top_p=1e-6)
    prompts = tiny.prompts()[:5]
    assert batched(almost, prompts)[0] == batched(greedy, prompts)[0]


def test_no_prompts_give_no_answers(tiny):
    assert batched(generator(tiny), [])[0] == []


def test_a_model_without_a_start_token_is_refused(tiny):
    model = make_model()
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id = config.bos_token_id = None
    with pytest.raises(BadModel, match="decoder_start_token_id"):
        Generator(model, tokenizer_of(tiny.model), GenerateOptions(), device=CPU)


def test_all_problems_are_reported_together():
    wrong = {"max_new_tokens": 0, "beams": 0, "temperature": -1, "top_p": 0, "repetition_penalty": 0}
    with pytest.raises(BadOption) as raised:
        GenerateOptions(**wrong)
    assert all(f"{name}={value} must be" in str(raised.value) for name, value in wrong.items())
    with pytest.raises(BadOption, match="beams=2 cannot be combined with temperature=0.5"):
        GenerateOptions(beams=2, temperature=0.5)
