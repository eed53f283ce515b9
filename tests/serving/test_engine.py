"""The engine: answers under load are those alone, within the memory limit, and nobody's request stops another's."""

import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from brimful.errors import BadOption, DoesNotFit, InternalError, ServerBusy
from brimful.serving import engine as engine_module
from brimful.serving.admission import Admission
from brimful.serving.batch import CausalBatch
from brimful.serving.engine import Engine, EngineOptions
from brimful.serving.sampling import Sampling
from brimful.units import KiB, MiB
from tests.serving.engines import generator, prompt, random_prompts, running, texts, wait_until
from tests.tasks.tiny import ROWS
from tests.tasks.tiny_causal import CONVERSATIONS, make_causal

ENDLESS = (10**9,)
"""No token ends an answer."""


@pytest.fixture(params=["tiny", "causal"])
def made(request):
    """An encoder-decoder and a causal model that know their answers."""
    return request.getfixturevalue(request.param)


def answers_of(made):
    if hasattr(made, "template"):
        return [one[-1]["content"] for one in CONVERSATIONS]
    return [row["response"].replace("，", ",") for row in ROWS]  # the tokenizer's normalisation


def busy(engine):
    """Fill the engine with an answer that takes long."""
    answer = engine.submit(prompt([5, 6, 7], new=400))
    wait_until(lambda: answer.tokens)
    return answer


def test_requests_at_once_are_answered_as_alone(made):
    with running(made) as engine:
        assert texts(engine, [prompt(one) for one in made.prompts()]) == answers_of(made)
        assert engine.choices["batch"][0] == "up to 64 requests at once"


def test_requests_that_come_one_after_another_share_a_batch(made):
    """From several threads, at times that differ from run to run: the answers must not."""
    most, results = 0, {}
    with running(made, end_ids=ENDLESS) as engine:
        alone = [texts(engine, [prompt(one, new=24)])[0] for one in made.prompts()]

        def ask(place):
            nonlocal most
            time.sleep(0.003 * place)
            answer = engine.submit(prompt(made.prompts()[place], new=24))
            results[place] = "".join(answer)
            most = max(most, engine.state().running)

        threads = [threading.Thread(target=ask, args=[place]) for place in range(len(alone))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [results[place] for place in range(len(alone))] == alone
    assert most > 1


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8, "seed": 3}, {"repetition_penalty": 1.7}],
    ids=str,
)
def test_any_way_of_decoding_gives_what_generate_gives(causal, options):
    """In float64, and with prompts of other kinds beside them."""
    model = make_causal("qwen2", 385, torch.float64, initializer_range=0.3, tie_word_embeddings=False)
    prompts = random_prompts(3, 7, 31, 1, 12)
    batch = generator(causal, model, **options)
    batch.end_ids = ENDLESS
    with running(causal, model, end_ids=ENDLESS) as engine:
        others = [engine.submit(prompt(one, temperature=2.0 * (place % 2))) for place, one in enumerate(prompts)]
        answers = [engine.submit(prompt(one, **options)) for one in prompts]
        for answer in [*answers, *others]:
            list(answer)
    assert [answer.tokens for answer in answers] == batch.answer_batch(prompts)


def test_an_encoder_decoder_samples_what_generate_samples(tiny):
    options = {"temperature": 3.0, "seed": 1, "repetition_penalty": 1.3}
    expected = generator(tiny, **options).answer_batch(tiny.prompts()[:6])
    with running(tiny) as engine:
        answers = [engine.submit(prompt(one, **options)) for one in tiny.prompts()[:6]]
        for answer in answers:
            list(answer)
    assert [answer.tokens for answer in answers] == expected


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_penalties_make_repetition_less_likely(causal, penalty):
    model = make_causal("qwen2", 385, tie_word_embeddings=True)  # untrained, it repeats itself
    with running(causal, model, end_ids=ENDLESS) as engine:
        plain, penalized = (
            engine.submit(prompt(causal.prompts()[0], new=40, **{penalty: value})) for value in (0.0, 2.0)
        )
        for answer in (plain, penalized):
            list(answer)
    assert len(set(penalized.tokens)) > len(set(plain.tokens))


def test_a_stream_comes_in_whole_characters(tiny):
    with running(tiny) as engine:
        for tokens, text in list(zip(tiny.prompts(), answers_of(tiny), strict=True))[:6]:
            pieces = list(engine.submit(prompt(tokens)))
            assert "".join(pieces) == text and len(pieces) > 1 and all(pieces) and "\ufffd" not in text


def test_the_prompt_runs_once_and_then_token_by_token(causal):
    seen, tokens = [], causal.prompts()[1]
    with running(causal) as engine:
        hook = causal.net.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        try:
            assert texts(engine, [prompt(tokens)]) == [answers_of(causal)[1]]
        finally:
            hook.remove()
    assert seen[0] == len(tokens) and set(seen[1:]) == {1}
    assert causal.net.config.use_cache is False


@pytest.fixture
def forwards(causal, monkeypatch):
    """Rows and tokens of each forward pass, where prompts of more than 16 tokens are long. They wait for `forwards.gate`."""
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", {"cpu": 16})
    seen = SimpleNamespace(shapes=[], gate=threading.Event())
    seen.gate.set()

    def note(module, args, kwargs):
        seen.shapes.append(tuple(kwargs["input_ids"].shape))
        assert seen.gate.wait(60)

    hook = causal.net.model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


def test_a_long_prompt_is_prefilled_in_pieces_between_the_tokens_of_others(causal, forwards):
    prompts = random_prompts(100, 40, 7)
    with running(causal, end_ids=ENDLESS) as engine:
        alone = [texts(engine, [prompt(one)])[0] for one in prompts]
        stream = busy(engine)
        forwards.shapes.clear()
        answers = [engine.submit(prompt(one)) for one in prompts]
        assert ["".join(answer) for answer in answers] == alone
        assert not stream.done
    pieces = [place for place, shape in enumerate(forwards.shapes) if shape == (1, 8)]
    assert len(pieces) == 100 // 8 + 40 // 8
    assert all(forwards.shapes[place + 1][1] == 1 for place in pieces), "a token for the others after each piece"
    assert max(tokens for _, tokens in forwards.shapes) == 8


def test_a_short_prompt_does_not_wait_for_a_long_one(causal, forwards):
    long, short = random_prompts(400, 7)
    with running(causal, end_ids=ENDLESS) as engine:
        forwards.gate.clear()
        first = engine.submit(prompt(long))
        wait_until(lambda: forwards.shapes[-1] == (1, 8))
        state = engine.state()
        assert (state.running, state.queued) == (1, 0)
        second = engine.submit(prompt(short))
        forwards.gate.set()
        assert "".join(first) and "".join(second)
    assert forwards.shapes.count((1, 8)) == 400 // 8
    assert second.submitted_s + second.first_token_s < first.submitted_s + first.first_token_s


def test_a_long_prompt_that_is_cancelled_is_not_prefilled_any_further(causal, forwards):
    long, short = random_prompts(400, 7)
    with running(causal, end_ids=ENDLESS) as engine:
        forwards.gate.clear()
        first = engine.submit(prompt(long))
        wait_until(lambda: forwards.shapes[-1] == (1, 8))
        engine.cancel(first)
        forwards.gate.set()
        with pytest.raises(ServerBusy, match="cancelled"):
            list(first)
        assert texts(engine, [prompt(short)])
        assert forwards.shapes.count((1, 8)) == 1 and engine.state().running == 0


def test_out_of_memory_within_a_long_prompt_begins_it_again(causal, forwards, monkeypatch):
    prompts = random_prompts(100, 7)
    with running(causal, end_ids=ENDLESS) as engine:
        expected = [texts(engine, [prompt(one)])[0] for one in prompts]
        failing, append = iter([False] * 5 + [True]), CausalBatch.append

        def sometimes(self, tokens):
            if tokens.shape[1] > 1 and next(failing, False):
                raise torch.OutOfMemoryError("out of memory")
            return append(self, tokens)

        monkeypatch.setattr(CausalBatch, "append", sometimes)
        assert texts(engine, [prompt(one) for one in prompts]) == expected
        assert engine.counts.ooms == 1
        assert engine.counts.prompt_tokens == 2 * 107, "counted once"


def test_prompts_of_unlike_lengths_are_not_padded_beyond_the_limit_of_a_prefill(causal, forwards):
    """One of 12 tokens and eight of 2 hold 28, and padded 108."""
    prompts = random_prompts(12, *[2] * 8)
    with running(causal, end_ids=ENDLESS) as engine:
        alone = [texts(engine, [prompt(one, new=4)])[0] for one in prompts]
        stream = busy(engine)
        forwards.shapes.clear()
        forwards.gate.clear()
        answers = [engine.submit(prompt(one, new=4)) for one in prompts]
        forwards.gate.set()
        assert ["".join(answer) for answer in answers] == alone
        engine.cancel(stream)
    prefills = [shape for shape in forwards.shapes if shape[1] > 1]
    assert max(rows * tokens for rows, tokens in prefills) <= 16
    assert (8, 2) in prefills


def test_the_time_to_come_again_leaves_idle_time_out(causal):
    with running(causal, end_ids=ENDLESS, max_batch=1) as engine:
        texts(engine, [prompt([5], new=2)])
        wait_until(lambda: engine.idle)
        time.sleep(2)
        texts(engine, [prompt([5], new=2)])
        busy(engine)
        engine.submit(prompt([5]))
        assert engine.retry_after_s() == 1


def test_who_waits_for_memory_is_tried_again_only_after_somebody_left(causal, monkeypatch):
    """To ask for the memory that is free takes 2 ms on a CPU, and as many tokens are written meanwhile."""
    asked, real = [], Admission.budget
    monkeypatch.setattr(Admission, "budget", lambda self, held: (asked.append(held), real(self, held))[1])
    with running(causal, end_ids=ENDLESS, limit=limit(causal, 0.8)) as engine:
        first = engine.submit(prompt(random_prompts(20)[0], new=300))
        wait_until(lambda: first.tokens)
        second = engine.submit(prompt(random_prompts(20)[0], new=300))
        list(first)
        assert second.first_token_s is None or not second.done
        list(second)
    assert len(asked) < 20


def test_log_probabilities_are_those_of_the_model_alone(causal):
    """Whatever temperature and penalties do, and whoever runs beside it."""
    model = make_causal("qwen2", 385, torch.float64, initializer_range=0.3, tie_word_embeddings=False)
    prompts = random_prompts(5, 12, 3)
    options = {"temperature": 2.0, "top_p": 0.9, "frequency_penalty": 1.5}
    with running(causal, model, end_ids=ENDLESS) as engine:
        answers = [
            engine.submit(prompt(one, top_logprobs=count, **options))
            for one, count in zip(prompts, (4, None, 0), strict=True)
        ]
        wait_until(lambda: all(answer.done for answer in answers))
    assert answers[1].take()[1] == []
    for place, count in ((0, 4), (2, 0)):
        tokens, (_, logprobs) = prompts[place], answers[place].take()
        with torch.no_grad():
            scores = model(torch.tensor([[*tokens, *answers[place].tokens]])).logits[0, len(tokens) - 1 : -1]
        expected = scores.float().log_softmax(-1)
        assert [one.token for one in logprobs] == answers[place].tokens
        for one, row in zip(logprobs, expected, strict=True):
            values, ids = row.topk(count)
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
            assert [token for token, _ in one.top] == ids.tolist()
            assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_an_answer_says_how_it_ended(causal):
    tokens = causal.prompts()[0]
    with running(causal) as engine:
        whole, short, stopped = (
            engine.submit(one) for one in (prompt(tokens), prompt(tokens, new=1), prompt(tokens, stop=("色",)))
        )
        assert ["".join(answer) for answer in (whole, short, stopped)] == ["红色。", "红", "红"]
    assert [answer.finish for answer in (whole, short, stopped)] == ["stop", "length", "stop"]


def test_an_answer_that_is_cancelled_leaves_at_once(causal):
    with running(causal, end_ids=ENDLESS, max_batch=1) as engine:
        first = busy(engine)
        second = engine.submit(prompt(causal.prompts()[0], new=4))
        engine.cancel(first)
        assert len("".join(second)) > 0
        assert len(first.tokens) < 400
        with pytest.raises(ServerBusy, match="cancelled"):
            list(first)


def test_a_full_queue_refuses_with_the_time_to_wait(causal):
    with running(causal, end_ids=ENDLESS, max_batch=1, max_queue=2) as engine:
        busy(engine)
        for _ in range(2):
            engine.submit(prompt([5]))
        with pytest.raises(ServerBusy, match="2 requests wait already") as raised:
            engine.submit(prompt([5]))
        assert 1 <= raised.value.retry_after_s <= 60


def test_a_request_that_waits_too_long_is_refused(causal):
    with running(causal, end_ids=ENDLESS, max_batch=1, max_wait_s=0.05) as engine:
        first = busy(engine)
        with pytest.raises(ServerBusy, match="waited 0.05 s without a place"):
            list(engine.submit(prompt([5])))
        assert not first.done


def test_a_prompt_longer_than_the_context_is_refused(causal):
    with running(causal, context=20) as engine:
        with pytest.raises(BadOption, match="21 tokens and must have 1 to 19"):
            engine.submit(prompt(random_prompts(21)[0]))
        assert engine.room(15) == 5
    with pytest.raises(BadOption, match="context=600 is more than the model's 512"):
        Engine(generator(causal), options=EngineOptions(context=600))


def test_all_problems_of_the_options_are_reported_together():
    with pytest.raises(BadOption) as raised:
        EngineOptions(max_batch=0, max_queue=0, max_wait_s=0, cuda_graphs="yes")
    assert all(name in str(raised.value) for name in ("max_batch=0", "max_queue=0", "max_wait=0", "cuda_graphs='yes'"))


def test_cuda_graphs_that_are_asked_for_need_a_gpu(causal):
    with pytest.raises(BadOption, match=r'cuda_graphs="on" is not possible on cpu'), running(causal, cuda_graphs="on"):
        pass


def weights(made):
    return sum(one.nbytes for one in made.net.parameters())


def limit(made, share=1.0):
    """Memory for the weights and for a few requests, or a share of that."""
    return weights(made) + int(share * (500 if hasattr(made, "template") else 250) * KiB)


def longest(made):
    return 480 if hasattr(made, "template") else 2000


def test_requests_wait_for_memory_instead_of_running_out_of_it(made):
    """The limit leaves room for a few of the 24, by prediction. The same answers, and no out-of-memory error."""
    notes = []
    with running(made, limit=limit(made), notes=notes) as engine:
        answers = [engine.submit(prompt(one)) for one in made.prompts()]
        most = 0
        while not all(answer.done for answer in answers):
            state = engine.state()
            most = max(most, state.running)
            assert state.predicted_bytes <= 0.85 * state.limit_bytes
            time.sleep(0.001)
        assert ["".join(answer) for answer in answers] == answers_of(made)
        assert engine.counts.ooms == 0 and not notes
        assert engine.state().peak_bytes <= limit(made)
    assert 1 <= most < len(answers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_out_of_memory_halves_the_batch_and_changes_no_answer(made, monkeypatch, temperature):
    """The memory model predicts nothing, so everybody is admitted at once."""
    monkeypatch.setattr(Admission, "needed_bytes", lambda self, size: 1.0)
    prompts = [prompt(one, new=24, temperature=temperature, seed=7) for one in made.prompts()]
    notes = []
    with running(made, end_ids=ENDLESS) as engine:
        expected = texts(engine, prompts)
    with running(made, end_ids=ENDLESS, limit=limit(made), notes=notes) as engine:
        assert texts(engine, prompts) == expected
        assert engine.counts.ooms == len(notes) > 0
    rows, half = map(int, re.search(r"out of memory with (\d+) requests .* At most (\d+) at once", notes[0]).groups())
    assert half == rows // 2


def test_the_batch_grows_again_after_an_out_of_memory_error(causal, monkeypatch):
    monkeypatch.setattr(engine_module, "CLEAN_TOKENS", 4)
    with running(causal, end_ids=ENDLESS) as engine:
        failing = iter([False, True])
        step = engine_module.Engine._step

        def sometimes(self):
            if next(failing, False):
                raise torch.OutOfMemoryError("out of memory")
            step(self)

        monkeypatch.setattr(engine_module.Engine, "_step", sometimes)
        answers = [engine.submit(prompt(one, new=40)) for one in causal.prompts()[:8]]
        wait_until(lambda: engine.counts.ooms == 1)
        wait_until(lambda: engine.state().running == 8)
        for answer in answers:
            list(answer)


@pytest.fixture
def exploding(monkeypatch):
    """As many of the next steps as `exploding.steps` says run out of memory."""
    left, step = SimpleNamespace(steps=0), engine_module.Engine._step

    def sometimes(self):
        if left.steps:
            left.steps -= 1
            raise torch.OutOfMemoryError("out of memory")
        step(self)

    monkeypatch.setattr(engine_module.Engine, "_step", sometimes)
    return left


def test_a_request_that_fits_alone_is_not_refused_after_many_errors(causal, exploding):
    """Each error is survived. They must not add up until nothing is admitted."""
    with running(causal, end_ids=ENDLESS, limit=limit(causal, 4)) as engine:
        for _ in range(12):
            exploding.steps = 1
            assert texts(engine, [prompt(random_prompts(20)[0], new=8)])
        assert engine.counts.ooms == 12


def test_what_is_predicted_for_a_batch_recovers_from_out_of_memory_errors(causal, exploding, monkeypatch):
    monkeypatch.setattr(engine_module, "CLEAN_TOKENS", 4)
    prompts = [prompt(one, new=40) for one in random_prompts(20, 20)]

    def predicted(engine):
        answers = [engine.submit(one) for one in prompts]
        wait_until(lambda: engine.state().running == 2)
        bytes_ = engine.state().predicted_bytes
        for answer in answers:
            list(answer)
        return bytes_

    with running(causal, end_ids=ENDLESS, limit=limit(causal, 8)) as engine:
        before = predicted(engine)
        exploding.steps = 1
        texts(engine, prompts)
        assert engine.counts.ooms == 1
        assert predicted(engine) == before


def test_a_request_that_cannot_fit_fails_alone(made):
    """By prediction: nothing is tried."""
    with running(made, limit=limit(made, 0.3)) as engine:
        long = engine.submit(prompt(made.prompts()[0], new=longest(made)))
        with pytest.raises(DoesNotFit, match="Try: a lower max_tokens"):
            list(long)
        assert texts(engine, [prompt(made.prompts()[0])]) == answers_of(made)[:1]
        assert engine.counts.ooms == 0


def test_a_request_that_runs_out_of_memory_alone_fails_alone(made, monkeypatch):
    monkeypatch.setattr(Admission, "needed_bytes", lambda self, size: 1.0)
    with running(made, end_ids=ENDLESS, limit=limit(made, 0.2)) as engine:
        long = engine.submit(prompt(made.prompts()[0], new=longest(made)))
        with pytest.raises(DoesNotFit, match="out of memory while answering"):
            list(long)
        assert len(texts(engine, [prompt(made.prompts()[0], new=3)])) == 1


def test_a_request_whose_random_numbers_do_not_fit_either_fails_alone(causal, monkeypatch):
    """Memory runs out while it is answered, twice, and then while its random numbers are drawn again."""

    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    with running(causal) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(engine_module.Engine, "_step", full)
            draws = iter([None, full])
            patched.setattr(Sampling, "repeat", lambda *_: (next(draws) or (lambda: None))())
            with pytest.raises(DoesNotFit, match="out of memory while answering"):
                list(engine.submit(prompt(causal.prompts()[0], temperature=1.0)))
        assert texts(engine, [prompt(causal.prompts()[0])]) == answers_of(causal)[:1]


def test_a_limit_below_the_weights_is_refused_at_the_start(causal):
    with pytest.raises(DoesNotFit), running(causal, limit=weights(causal) // 2):
        pass


def test_a_limit_without_room_for_one_token_is_refused_at_the_start(causal):
    """The probes, which are smaller than what a prediction leaves room for, still fit."""
    refused = pytest.raises(DoesNotFit, match="an answer of one token need .* Try: a higher memory_limit=")
    with refused, running(causal, limit=round(weights(causal) / 0.85) + 64):
        pass


def test_a_limit_that_refuses_usual_requests_is_noted_at_the_start(causal):
    notes = []
    with running(causal, limit=round((weights(causal) + 15 * KiB) / 0.85), notes=notes):
        pass
    assert any("an answer of 16 tokens needs" in note and "are refused" in note for note in notes), notes


def test_draining_answers_what_was_accepted_and_nothing_more(causal):
    with running(causal, max_batch=1) as engine:
        answers = [engine.submit(prompt(one)) for one in causal.prompts()[:4]]
        engine.drain()
        with pytest.raises(ServerBusy, match="shutting down"):
            engine.submit(prompt([5]))
        assert ["".join(answer) for answer in answers] == answers_of(causal)[:4]


def test_closing_fails_what_is_left(causal):
    with running(causal, end_ids=ENDLESS, max_batch=1) as engine:
        answers = [busy(engine), engine.submit(prompt([5]))]
        engine.close()
        for answer in answers:
            with pytest.raises(ServerBusy, match="shutting down"):
                list(answer)


def broken(*args, **kwargs):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_error_in_a_batch_fails_those_in_it_and_the_others_go_on(causal, monkeypatch):
    with running(causal) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "prefill", broken)
            with pytest.raises(InternalError):
                list(engine.submit(prompt([5])))
        assert texts(engine, [prompt(causal.prompts()[0])]) == answers_of(causal)[:1]
        assert engine.failed is None


def test_a_request_that_breaks_the_model_ends_only_itself(causal, monkeypatch):
    """However often it is sent."""
    real = engine_module.prefill

    def sometimes(generator, rows):
        return broken() if any(list(row.prompt) == [5] for row in rows) else real(generator, rows)

    monkeypatch.setattr(engine_module, "prefill", sometimes)
    with running(causal) as engine:
        for _ in range(3 * engine_module.FAILURES):
            with pytest.raises(InternalError):
                list(engine.submit(prompt([5])))
        assert texts(engine, [prompt(causal.prompts()[0])]) == answers_of(causal)[:1]


def test_a_model_that_fails_again_and_again_ends_the_engine(causal, monkeypatch):
    with running(causal) as engine:
        monkeypatch.setattr(causal.net, "forward", broken)
        for _ in range(engine_module.FAILURES):
            with pytest.raises(InternalError, match="illegal memory access"):
                list(engine.submit(prompt([5])))
        wait_until(lambda: engine.failed is not None)
        with pytest.raises(InternalError):
            engine.submit(prompt([5]))


def test_the_state_counts(causal):
    with running(causal, limit=64 * MiB) as engine:
        texts(engine, [prompt(one) for one in causal.prompts()[:5]])
        state, counts = engine.state(), engine.counts
        assert counts.prompt_tokens == sum(map(len, causal.prompts()[:5]))
        assert counts.answered == counts.first_tokens[-1] == 5 and counts.answer_tokens > 5
        assert counts.tokens_per_second > 0 and counts.first_token_s > 0
        assert list(counts.first_tokens) == sorted(counts.first_tokens)
        assert weights(causal) <= state.used_bytes <= state.peak_bytes <= state.limit_bytes == 64 * MiB


def test_a_model_that_cannot_join_answers_one_at_a_time(causal):
    model = make_causal("mamba", 385, torch.float32, state_size=4)
    prompts = random_prompts(3, 9, 5)
    with running(causal, model, end_ids=ENDLESS) as engine:
        value, reason = engine.choices["batch"]
        assert value == "one request at a time" and "cannot be padded" in reason
        answers = [engine.submit(prompt(one)) for one in prompts]
        for answer in answers:
            list(answer)
    alone = generator(causal, model)
    alone.end_ids = ENDLESS
    assert [answer.tokens for answer in answers] == [alone.answer_batch([one])[0] for one in prompts]


def test_an_adapter_answers_in_a_batch_as_alone(made):
    from copy import deepcopy

    from peft import LoraConfig, get_peft_model

    kind, modules = ("CAUSAL_LM", ["q_proj"]) if hasattr(made, "template") else ("SEQ_2_SEQ_LM", ["q"])
    model = get_peft_model(deepcopy(made.net).double(), LoraConfig(task_type=kind, r=4, target_modules=modules)).eval()
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=3.0)
    with running(made, model) as engine:
        answers = [engine.submit(prompt(one)) for one in made.prompts()[:8]]
        for answer in answers:
            list(answer)
    expected = generator(made, model)
    assert [answer.tokens for answer in answers] == [expected.answer_batch([one])[0] for one in made.prompts()[:8]]
    assert [answer.tokens for answer in answers] != generator(made).answer_batch(made.prompts()[:8])


def test_a_process_that_forgets_to_close_ends_well(tiny):
    """Right after an answer, while the engine's thread may still be within torch."""
    program = (
        "import sys, torch\nfrom brimful.serving.chat import Chat\nfrom brimful.tasks.generate import GenerateOptions\n"
        "chat = Chat(sys.argv[1], GenerateOptions(max_new_tokens=16), device=torch.device('cpu'))\n"
        "print(next(chat.ask(sys.argv[2])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny.model), ROWS[0]["prompt"]], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "红\n"), done.stderr
