"""Answers: the same in any batch, ended by the tokenizer's eos, in whole characters, within the memory limit."""

import random

import pytest
import torch

from brimful.errors import BadModel, BadOption, DoesNotFit
from brimful.memory.forward import Forward, eval_mode
from brimful.memory.ledger import simulated_memory
from brimful.tasks.generate import HELP, Chat, GenerateOptions, Generator, talk
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
        list(generator(tiny).stream(tiny.prompts()[0]))
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


def test_a_stream_gives_the_answer_in_whole_characters(tiny):
    made = generator(tiny)
    for prompt, row in list(zip(tiny.prompts(), ROWS, strict=True))[:6]:
        pieces = list(made.stream(prompt))
        assert "".join(pieces) == row["response"].replace("，", ",")
        assert len(pieces) > 1 and "\ufffd" not in "".join(pieces)
        assert all(pieces)


def test_an_incomplete_character_comes_at_the_end(tiny, monkeypatch):
    made = generator(tiny)
    half = made.tokenizer.encode("𠀀")[:2]  # two of its four bytes
    monkeypatch.setattr(made, "_tokens", lambda prompt: iter([*made.tokenizer.encode("红")[:-1], *half]))
    assert list(made.stream([1])) == ["红", made.tokenizer.decode(half)]


def test_a_stream_with_beams_is_one_piece(tiny):
    made = generator(tiny, beams=2)
    assert list(made.stream(tiny.prompts()[0])) == [made.tokenizer.decode(batched(made, tiny.prompts()[:1])[0][0])]


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
        return batched(made, tiny.prompts()[:2])[0], "".join(made.stream(tiny.prompts()[0]))

    first, again, other = sampled(1), sampled(1), sampled(2)
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


def test_a_tiny_top_p_is_greedy(tiny):
    greedy, almost = generator(tiny), generator(tiny, temperature=1.0, top_p=1e-6)
    prompts = tiny.prompts()[:5]
    assert batched(almost, prompts)[0] == batched(greedy, prompts)[0]
    assert ["".join(almost.stream(one)) for one in prompts] == ["".join(greedy.stream(one)) for one in prompts]


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


QUESTION, ANSWER = "甲的花是什么颜色？", "红色。"


@pytest.fixture(scope="module")
def chat(tiny):
    return Chat(tiny.model, GenerateOptions(max_new_tokens=16), device=CPU)


def talk_output(chat, *lines):
    """The output of a talk with these lines, and the lines that were not read."""
    left, output = list(lines), []

    def read():
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    talk(chat, read, output.append)
    return "".join(output), left


def test_an_answer_comes_in_pieces(chat):
    pieces = list(chat.ask(QUESTION))
    assert "".join(pieces) == ANSWER and len(pieces) == 3


def test_a_reply_is_whole(chat):
    pieces = []
    reply = chat.reply(QUESTION, pieces.append)
    assert (reply.prompt, reply.response, "".join(pieces)) == (QUESTION, ANSWER, ANSWER)
    assert set(reply.to_json()) == {"prompt", "response", "seconds"}


def test_a_question_does_not_depend_on_earlier_ones(chat):
    output, _ = talk_output(chat, QUESTION, QUESTION)
    assert output == f"{ANSWER}\n" * 2


@pytest.mark.parametrize("word", ["/quit", "/exit", "  /quit "])
def test_quit_ends(chat, word):
    assert talk_output(chat, word, QUESTION) == ("", [QUESTION])


def test_empty_lines_are_ignored_and_help_is_given(chat):
    output, _ = talk_output(chat, "", "  ", "/help")
    assert output == f"{HELP['questions']}\n" and "does not remember" in output


def test_ctrl_c_stops_the_answer_but_not_the_talk(chat, monkeypatch):
    def interrupted(question):
        yield "红"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat, "ask", interrupted)
        output, left = talk_output(chat, QUESTION, "/quit")
    assert output == "红 …\n" and not left


def test_a_failed_question_does_not_end_the_talk(chat, monkeypatch):
    monkeypatch.setattr(chat.generator, "context_tokens", 12)
    output, _ = talk_output(chat, "很长" * 10, QUESTION)
    assert (
        output == f"(the question has 21 tokens, but the model reads 12 at most. Try: a shorter question.)\n{ANSWER}\n"
    )
    with pytest.raises(BadOption):
        list(chat.ask("很长" * 10))


def test_out_of_memory_is_a_user_error(chat, monkeypatch):
    def full(ids):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(chat.generator, "stream", full)
    with pytest.raises(DoesNotFit, match="out of memory while answering"):
        list(chat.ask(QUESTION))


def test_bytes_that_are_not_text_are_replaced(chat):
    assert isinstance(chat.reply("\udce4甲").response, str)
