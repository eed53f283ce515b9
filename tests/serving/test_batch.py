"""Rows that join and leave a batch: each goes on as it would alone. Models where that is not so are found out."""

import pytest
import torch

from brimful.memory.meter import meter
from brimful.serving.batch import RowTokens, joinable, prefill
from brimful.serving.replayed_batch import Recordings, ReplayedBatch, replayable
from tests.serving.engines import generator, random_prompts
from tests.tasks.tiny import make_model
from tests.tasks.tiny_causal import make_causal

FAMILIES = ["qwen2", "llama", "gemma3_text", "mistral", "gpt2", "t5"]
"""With full and sliding attention, with positions that are learned, rotated and relative, and an encoder-decoder."""
WINDOWED = ["gemma3_text", "mistral"]
NEW = 14


def make(kind):
    """In float64, where rounding cannot change an answer, with answers that vary."""
    if kind == "t5":
        model = make_model(385, num_decoder_layers=2).double().eval()
        for weight in model.parameters():
            weight.data *= 3
        return model
    return make_causal(kind, 385, torch.float64, initializer_range=0.3, tie_word_embeddings=False)


def made(causal, kind):
    made = generator(causal, make(kind))
    made.end_ids = (10**9,)
    return made


@torch.no_grad()
def alone(made, tokens):
    batch, scores = prefill(made, [RowTokens(tokens)])
    answer = [int(scores.argmax())]
    while len(answer) < NEW:
        answer.append(int(batch.step(torch.tensor(answer[-1:])).argmax()))
    return answer


def record(work, device):
    """Instead of a graph: what it computes, in the same tensor each time."""
    scores = torch.empty(0, dtype=torch.float64)

    def replay():
        result = work()
        scores.resize_(result.shape).copy_(result)

    return scores, replay


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_rows_that_join_and_leave_are_answered_as_alone(causal, kind, replayed, monkeypatch):
    """Prompts longer and shorter than those that run, and than the window of 8 tokens; the longest leaves first."""
    if replayed and kind in WINDOWED:
        pytest.skip("a window has no fixed size")
    monkeypatch.setattr("brimful.serving.replayed_batch.LEAST_LENGTH", 8)  # so that answers outgrow their caches
    source, prompts = made(causal, kind), random_prompts(12, 3, 31, 7, 1)
    expected = [alone(source, one) for one in prompts]
    waves, answers = {0: [0, 1], 3: [2, 3], 5: [4]}, {row: [] for row in range(5)}
    batch, rows = None, []
    for step in range(30):
        if rows:
            tokens = batch.step(torch.tensor([answers[row][-1] for row in rows])).argmax(-1)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                answers[row].append(token)
        if step in waves:
            joined, scores = prefill(source, [RowTokens(prompts[row]) for row in waves[step]])
            for row, token in zip(waves[step], scores.argmax(-1).tolist(), strict=True):
                answers[row].append(token)
            if batch is not None:
                batch.join(joined)
            else:
                batch = ReplayedBatch(source, joined, Recordings(record)) if replayed else joined
            rows += waves[step]
        left = [row for row in rows if len(answers[row]) < (9 if row == 2 else NEW)]
        if left and left != rows:
            batch.keep([rows.index(row) for row in left])
        rows = left
        if not rows and step > 5:
            break
    assert [answers[row] for row in range(5)] == [one[: len(answers[row])] for row, one in enumerate(expected)]
    assert [len(answers[row]) for row in range(5)] == [NEW, NEW, 9, NEW, NEW]
    assert len({token for one in expected for token in one}) > 10, "answers that vary would show a mistake"


@pytest.mark.parametrize("kind", ["qwen2", "t5"])
@torch.no_grad()
def test_a_row_that_overflowed_spoils_none_that_takes_its_place(causal, kind):
    source, prompts = made(causal, kind), random_prompts(12, 3, 5)
    source.model.get_input_embeddings().weight.data[7] = torch.nan
    spoiled, first, second = [7, *prompts[0]], *([token or 1 for token in one if token != 7] for one in prompts[1:])
    batch = ReplayedBatch(source, prefill(source, [RowTokens(spoiled), RowTokens(first)])[0], Recordings(record))
    assert batch.step(torch.tensor([7, 1]))[0].isnan().all()
    batch.keep([1])
    batch.join(prefill(source, [RowTokens(second)])[0])
    expected = prefill(source, [RowTokens(second)])[0].step(torch.tensor([3]))
    assert torch.allclose(batch.step(torch.tensor([1, 3]))[1], expected[0], equal_nan=True)  # T5 has tied weights


@torch.no_grad()
def test_rows_move_into_the_cache_of_fixed_size_layer_by_layer(causal):
    model = make_causal("qwen2", 385, torch.float64, num_hidden_layers=12, layer_types=["full_attention"] * 12)
    source = generator(causal, model)
    with meter(torch.device("cpu")) as metered:
        batch, _ = prefill(source, [RowTokens(one) for one in random_prompts(*[111] * 32)])
        metered.phase("moving")
        replayed = ReplayedBatch(source, batch, Recordings(record))
    assert metered.reading().phases["moving"] < 1.4 * replayed.cache_bytes


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_an_answer_goes_on_after_its_tokens_were_prefilled_again(causal, kind):
    """As after an out-of-memory error."""
    source, prompts = made(causal, kind), random_prompts(12, 3)
    expected = [alone(source, one) for one in prompts]
    known = [expected[0][:9], expected[1][:2]]
    _, scores = prefill(source, [RowTokens(one, known[row]) for row, one in enumerate(prompts)])
    assert scores.argmax(-1).tolist() == [expected[0][9], expected[1][2]]


@pytest.mark.parametrize("kind", FAMILIES[:-1])
@pytest.mark.parametrize("piece", [3, 13])
@torch.no_grad()
def test_a_prompt_that_is_prefilled_in_pieces_is_answered_as_whole(causal, kind, piece):
    """Pieces shorter and longer than the window of 8 tokens."""
    source, tokens = made(causal, kind), random_prompts(31)[0]
    batch, scores = prefill(source, [RowTokens(tokens[:piece])])
    for begin in range(piece, len(tokens), piece):
        scores = batch.append(torch.tensor([tokens[begin : begin + piece]]))
    answer = [int(scores.argmax())]
    while len(answer) < NEW:
        answer.append(int(batch.step(torch.tensor(answer[-1:])).argmax()))
    assert answer == alone(source, tokens)


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_padding_that_nobody_needs_is_cut_off(causal, kind):
    source = made(causal, kind)
    batch, _ = prefill(source, [RowTokens(one) for one in random_prompts(31, 5)])
    before = batch.cache_bytes
    batch.keep([1])
    assert batch.shape[0] == 5
    only, _ = prefill(source, [RowTokens(random_prompts(31, 5)[1])])
    assert batch.cache_bytes == only.cache_bytes < before / 2


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_that_can_join_do(causal, kind):
    possible, reason = joinable(made(causal, kind))
    assert possible and "the same rows alone" in reason


def test_a_recurrent_state_cannot_join(causal):
    model = make_causal("mamba", 385, torch.float32, state_size=4)
    assert joinable(generator(causal, model)) == (
        False,
        "LinearAttentionLayer in the model's cache cannot be padded",
    )


def test_positions_that_a_decoder_counts_by_itself_cannot_join(causal):
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 64}.items()
    }
    config = BartConfig(vocab_size=385, d_model=32, max_position_embeddings=64, init_std=0.5, **sizes)
    possible, reason = joinable(generator(causal, BartForConditionalGeneration(config).eval()))
    assert not possible and "other scores than alone" in reason


@pytest.mark.parametrize("kind", ["qwen2", "t5"])
def test_replays_are_compared_with_launches_before_they_are_used(causal, kind):
    source = made(causal, kind)
    assert replayable(source, Recordings(record), timed=False)[0]
    stale = Recordings(lambda work, device: (work(), lambda: None))
    possible, reason = replayable(source, stale, timed=False)
    assert not possible and "other scores" in reason


def test_a_model_that_cannot_be_recorded_is_found_out(causal):
    def refuse(work, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    possible, reason = replayable(made(causal, "qwen2"), Recordings(refuse))
    assert not possible and "operation not permitted" in reason


def test_a_window_has_no_fixed_size(causal):
    possible, reason = replayable(made(causal, "mistral"), Recordings(record))
    assert not possible and "DynamicSlidingWindowLayer in the model's cache has no fixed size" in reason
