"""Answers: the same in any batch, ended by the tokenizer's eos, whole characters, within the memory at hand."""

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


def generator(place, **options):
    chosen = GenerateOptions(**{"max_new_tokens": 16, **options})
    return Generator(place.net, tokenizer_of(place.model), chosen, device=CPU)


_fitted = {}


def batched(made, prompts, *, probe=False, **options):
    """The answers, by a memory model that is made once for each kind of decoding, unless it is to be probed."""
    forward = Forward(made.dummy, made.model, CPU, what="generation", **options)
    if not probe:
        if made.options.beams not in _fitted:
            _fitted[made.options.beams] = forward.fit((17, 8))
        forward.model = _fitted[made.options.beams]
    with eval_mode(made.model, CPU):
        return made.answers(prompts, forward), forward


def test_the_model_knows_its_rows(place):
    """Without this, nothing below would mean much."""
    made = generator(place)
    answers, _ = batched(made, place.prompts())
    right = [made.tokenizer.decode(ids) for ids in answers]
    assert right == [row["response"].replace("，", ",") for row in ROWS]  # the tokenizer's normalisation


@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_batches_answer_as_one_by_one(place, options):
    made, prompts = generator(place, **options), place.prompts()[:6]
    answers, forward = batched(made, prompts, fewest=True)
    assert forward.batches == 1
    with eval_mode(made.model, CPU):
        assert answers == [made._batch([prompt])[0] for prompt in prompts]


def test_an_answer_ends_at_the_tokenizers_eos_whatever_the_model_says(place):
    made = generator(place, max_new_tokens=40)
    expected, _ = batched(made, place.prompts()[:4])
    assert all(len(answer) < 15 for answer in expected)
    wrong = make_model(place.net.config.vocab_size)
    wrong.load_state_dict(place.net.state_dict())
    wrong.config.eos_token_id = wrong.generation_config.eos_token_id = 300
    passes = []
    wrong.decoder.register_forward_pre_hook(lambda module, args: passes.append(1))
    other = Generator(wrong.eval(), made.tokenizer, made.options, device=CPU)
    assert batched(other, place.prompts()[:4])[0] == expected
    assert len(passes) == 1 + max(map(len, expected)), "it went on after the end"


def test_an_answer_without_an_end_stops_at_the_limit(place):
    answers, _ = batched(generator(place, max_new_tokens=2), place.prompts()[:3])
    assert [len(answer) for answer in answers] == [2, 2, 2]


def test_a_cache_is_used_although_the_config_has_it_off(place):
    assert place.net.config.use_cache is False
    seen = []
    hook = place.net.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        batched(generator(place), place.prompts()[:2])
        list(generator(place).stream(place.prompts()[0]))
    finally:
        hook.remove()
    assert set(seen) == {1}


def test_a_memory_limit_cuts_the_prompts_and_changes_no_answer(place):
    made = generator(place)
    expected, _ = batched(made, place.prompts())
    with simulated_memory(250 * KiB) as memory:
        memory.adopt(place.net.parameters())
        answers, forward = batched(made, place.prompts(), probe=True, fewest=True)
    assert answers == expected
    assert forward.batches > 1 and memory.ooms == 0


def test_out_of_memory_while_generating_is_survived_with_the_same_answers(place, monkeypatch):
    """The probes saw a single word, whatever they were asked for."""
    made, told = generator(place), []
    expected, _ = batched(made, place.prompts())
    monkeypatch.setattr(made, "dummy", lambda rows, shape: Generator.dummy(made, 1, (1, 1)))
    with simulated_memory(220 * KiB) as memory:
        memory.adopt(place.net.parameters())
        answers, forward = batched(made, place.prompts(), probe=True, fewest=True, tell=told.append)
    assert answers == expected
    assert forward.ooms == memory.ooms == len(told) > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_what_generation_takes_is_predicted_from_shorter_ones(place, beams):
    made = generator(place, beams=beams)
    forward = Forward(made.dummy, place.net, CPU)
    model = forward.fit((17, 8))
    with simulated_memory("1GiB") as memory, eval_mode(place.net, CPU):
        memory.adopt(place.net.parameters())
        before = memory.live_bytes
        made.dummy(24, (17, 32))
    assert model.peak_bytes(24, (17, 32)) == pytest.approx(memory.peak_bytes - before, rel=0.1)


def test_random_state_is_left_alone(place):
    before = torch.get_rng_state(), random.getstate()
    batched(generator(place, temperature=0.8), place.prompts()[:3], probe=True)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_a_stream_says_what_a_batch_says_in_whole_characters(place):
    made = generator(place)
    for prompt, row in list(zip(place.prompts(), ROWS, strict=True))[:6]:
        pieces = list(made.stream(prompt))
        assert "".join(pieces) == row["response"].replace("，", ",")
        assert len(pieces) > 1 and "\ufffd" not in "".join(pieces)
        assert all(pieces)


def test_bytes_that_never_become_a_character_are_said_at_the_end(place, monkeypatch):
    made = generator(place)
    half = made.tokenizer.encode("𠀀")[:2]  # two of its four bytes
    monkeypatch.setattr(made, "_tokens", lambda prompt: iter([*made.tokenizer.encode("红")[:-1], *half]))
    assert list(made.stream([1])) == ["红", made.tokenizer.decode(half)]


def test_a_stream_with_beams_is_one_piece(place):
    made = generator(place, beams=2)
    assert list(made.stream(place.prompts()[0])) == [made.tokenizer.decode(batched(made, place.prompts()[:1])[0][0])]


def test_beams_find_what_greed_misses(place):
    """Several sequences at once find one that is likelier as a whole."""
    unlearnt = make_model(place.net.config.vocab_size).eval()
    tokenizer, prompts = tokenizer_of(place.model), place.prompts()[:3]
    made = [Generator(unlearnt, tokenizer, GenerateOptions(max_new_tokens=4, beams=n), device=CPU) for n in (1, 8)]
    assert made[0]._batch(prompts) != made[1]._batch(prompts)


def test_drawing_follows_the_seed(place):
    def drawn(seed):
        made = generator(place, temperature=5.0, seed=seed)
        return batched(made, place.prompts()[:2])[0], "".join(made.stream(place.prompts()[0]))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


def test_a_tiny_share_of_the_likeliest_is_no_drawing_at_all(place):
    greedy, almost = generator(place), generator(place, temperature=1.0, top_p=1e-6)
    prompts = place.prompts()[:5]
    assert batched(almost, prompts)[0] == batched(greedy, prompts)[0]
    assert ["".join(almost.stream(one)) for one in prompts] == ["".join(greedy.stream(one)) for one in prompts]


def test_no_prompts_are_no_answers(place):
    assert batched(generator(place), [])[0] == []


def test_a_model_that_does_not_say_how_to_begin_is_refused(place):
    model = make_model()
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id = config.bos_token_id = None
    with pytest.raises(BadModel, match="decoder_start_token_id"):
        Generator(model, tokenizer_of(place.model), GenerateOptions(), device=CPU)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(BadOption) as told:
        GenerateOptions(max_new_tokens=0, beams=0, temperature=-1, top_p=0, repetition_penalty=0)
    assert all(
        flag in str(told.value) for flag in ("--max-new-tokens", "--beams", "--temperature", "--top-p", "--repet")
    )
    with pytest.raises(BadOption, match="--beams and --temperature"):
        GenerateOptions(beams=2, temperature=0.5)
