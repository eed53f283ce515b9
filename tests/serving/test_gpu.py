"""The engine on a card: answers are those of the CPU, memory that runs out is survived, and what does not fit is refused."""

from contextlib import contextmanager
from dataclasses import replace
from functools import wraps

import pytest
import torch

from brimful.errors import BadOption, DoesNotFit
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import find_target
from brimful.serving.engine import Engine, EngineOptions
from brimful.tasks.generate import GenerateOptions, Generator
from brimful.tasks.model_folder import tokenizer_of
from brimful.units import MiB
from tests.serving.engines import prompt, random_prompts, running, texts, wait_until
from tests.tasks.tiny_causal import make_causal

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda:0")
ENDLESS = (10**9,)


@pytest.fixture(scope="module")
def net():
    return make_causal("qwen2", 385, torch.float64, initializer_range=0.3, tie_word_embeddings=False)


@contextmanager
def counted_replays():
    """One entry for each replay."""
    with pytest.MonkeyPatch.context() as patch:
        replays, replay = [], torch.cuda.CUDAGraph.replay
        patch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph)))
        yield replays


@contextmanager
def on_the_card(causal, net, limit=None, cuda_graphs="auto"):
    torch.cuda.empty_cache()
    target = find_target(PlanOptions(device="cuda"))
    if limit is not None:
        target = replace(target, limit_bytes=limit, requested=True, limit_reason="as requested")
    options = GenerateOptions(max_new_tokens=16)
    model = net.to(CARD)
    generator = Generator(model, tokenizer_of(causal.model), options, device=CARD, end_ids=ENDLESS)
    engine = Engine(generator, target, EngineOptions(cuda_graphs=cuda_graphs))
    try:
        yield engine.start()
    finally:
        engine.close()
        net.cpu()


@pytest.mark.parametrize("cuda_graphs", ["on", "off"])
def test_answers_are_those_of_the_cpu(causal, net, cuda_graphs):
    prompts = [
        prompt(one, new=new) for one, new in zip(random_prompts(3, 60, 17, 1, 30), (16, 90, 3, 40, 1), strict=True)
    ]
    with running(causal, net, end_ids=ENDLESS) as engine:
        expected = texts(engine, prompts)
    with on_the_card(causal, net, cuda_graphs=cuda_graphs) as engine:
        assert texts(engine, prompts) == expected
        assert texts(engine, prompts[1:2]) == expected[1:2]


def test_tokens_are_replayed(causal, net):
    """After those that are launched once for each size of the cache."""
    with on_the_card(causal, net, cuda_graphs="on") as engine, counted_replays() as replays:
        texts(engine, [prompt(random_prompts(20)[0], new=43)])  # stays within the smallest cache, of 64
    assert len(replays) == 41  # the first token comes from the prompt, the second is launched


def reading_back(forward):
    """A forward that waits for a number from the device, which a graph cannot."""

    @wraps(forward)
    def reads_back(*arguments, **options):
        output = forward(*arguments, **options)
        assert float(output.logits.sum()) == output.logits.sum().item()
        return output

    return reads_back


def test_what_a_graph_cannot_do_is_launched(causal, net, monkeypatch):
    monkeypatch.setattr(net, "forward", reading_back(net.forward))
    with on_the_card(causal, net) as engine:
        assert engine.choices["cuda_graphs"][0] == "CUDA graphs off"
        assert "cannot be recorded" in engine.choices["cuda_graphs"][1]
        assert len(texts(engine, [prompt(random_prompts(20)[0])])) == 1
        torch.cuda.empty_cache()  # which fails during a capture, and after one that was not ended
        assert torch.rand(1, device=CARD) < 1
    refused = pytest.raises(BadOption, match=r'cuda_graphs="on" is not possible: the model cannot be recorded')
    with refused, on_the_card(causal, net, cuda_graphs="on"):
        pass


def test_recording_that_fails_later_is_reported_and_changes_no_answer(causal, net, monkeypatch):
    prompts, notes = [prompt(one) for one in random_prompts(20, 30)], []
    with on_the_card(causal, net, cuda_graphs="on") as engine:
        expected = texts(engine, prompts)
        monkeypatch.setattr(engine, "_note", notes.append)
        monkeypatch.setattr(net, "forward", reading_back(net.forward))
        assert [texts(engine, prompts) for _ in range(2)] == [expected] * 2
        assert engine.choices["cuda_graphs"][0] == "CUDA graphs off"
    assert len(notes) == 1 and "no more tokens are replayed" in notes[0]


@pytest.mark.parametrize("cuda_graphs", ["on", "off"])
def test_memory_that_others_take_in_between_changes_no_answer(causal, net, cuda_graphs):
    prompts = [prompt(one, new=48) for one in random_prompts(*range(20, 60))]
    limit = 16 * MiB
    with on_the_card(causal, net, limit, cuda_graphs) as engine:
        expected = texts(engine, prompts)
        answers = [engine.submit(one) for one in prompts]
        first = next(iter(answers[0]))
        held = torch.empty(max(0, limit - torch.cuda.memory_reserved() - 2 * MiB), dtype=torch.uint8, device=CARD)
        again = ["".join(answer) for answer in answers]
        del held
    assert [first + again[0], *again[1:]] == expected


def test_the_peak_is_measured_while_others_still_run(causal, net):
    long, short = (prompt(one, new=new) for one, new in zip(random_prompts(20, 20), (400, 3), strict=True))
    with on_the_card(causal, net) as engine:
        answer = engine.submit(long)
        next(iter(answer))
        texts(engine, [short])
        wait_until(lambda: engine.state().peak_bytes is not None)
        assert not answer.done
        engine.cancel(answer)


def test_a_limit_below_the_weights_is_refused_at_the_start(causal, net):
    weights = sum(one.nbytes for one in net.parameters())
    with pytest.raises(DoesNotFit, match="serving"), on_the_card(causal, net, weights // 2):
        pass
