"""The contract of a task: its defaults, what a task that lacks a part reports, and every form a loss may have."""

import dataclasses
import doctest
from collections import UserDict
from types import MappingProxyType

import pytest
import torch
import transformers
from torch import nn

import brimful.task
from brimful.errors import TaskError
from brimful.task import Loss, Task, loss_terms, rows_of, term_counts, weighted_by_rows


class Empty(Task):
    """Defines nothing."""


def test_the_default_name_is_that_of_the_class():
    assert Empty.name == Empty().name == "Empty"


def test_a_task_keeps_its_own_name_and_a_subclass_of_it_does_not():
    class Named(Task):
        name = "my-task"

    class Variant(Named): ...

    assert (Named().name, Variant().name) == ("my-task", "Variant")


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (lambda task: task.model(), "no model()"),
        (lambda task: task.loss(nn.Identity(), None), "no loss()"),
        (lambda task: task.dummy(2, (8,)), "no dummy()"),
        (lambda task: task.rows("rows.parquet"), "no rows()"),
    ],
)
def test_a_missing_method_is_named_with_what_to_define(call, missing):
    with pytest.raises(TaskError) as error:
        call(Empty())
    assert f"task Empty has {missing}" in str(error.value)
    assert f"define {missing[3:-1]}" in str(error.value)


def test_a_task_says_whether_it_can_make_dummies():
    class WithDummy(Task):
        def dummy(self, rows, shape):
            return {}

    assert (Empty().has_dummy, WithDummy().has_dummy) == (False, True)


def test_a_task_has_the_options_it_declares():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Choices:
        width: int = 8

    class Configurable(Task):
        Options = Choices

    assert Configurable().options == Choices()
    assert Configurable(Choices(width=4)).options.width == 4
    assert Empty().options is None


def test_the_default_optimizer_leaves_frozen_weights_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).requires_grad_(False)
    model[1].requires_grad_(True)
    optimizer = Empty().optimizer(model)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [
        id(p) for p in model[1].parameters()
    ]


def test_the_default_optimizer_is_adamw_not_fused_on_the_cpu():
    optimizer = Empty().optimizer(nn.Linear(2, 1))
    assert type(optimizer) is torch.optim.AdamW
    assert not optimizer.param_groups[0]["fused"]


def test_the_default_schedule_is_that_of_the_command_line():
    assert Empty().schedule(Empty().optimizer(nn.Linear(2, 1)), 10) is None


def test_training_begins_with_a_new_model_by_default():
    class Small(Task):
        def model(self):
            return nn.Linear(2, 1)

    assert isinstance(Small().initial_model(), nn.Linear)


def test_rows_collate_into_one_batch():
    batch = Empty().collate([{"x": torch.tensor([1, 2]), "y": 3}, {"x": torch.tensor([4, 5]), "y": 6}])
    assert batch["x"].tolist() == [[1, 2], [4, 5]]
    assert batch["y"].tolist() == [3, 6]


def test_a_row_has_the_worst_shape_by_default():
    class Text(Task):
        worst_shape = (128, 64)

    assert Text().shape("any row") == (128, 64)


def test_a_task_has_no_checkpointing_of_its_own_by_default():
    assert Empty().checkpointing(nn.Linear(1, 1), True) is False


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(brimful.task, extraglobs={"torch": torch}).failed == 0


def test_a_loss_cannot_be_changed():
    loss = Loss(sum=torch.tensor(6.0), count=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.count = 1


def number(value: float = 2.0, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, requires_grad=True)


def terms(value, model=None, batch=None, **how):
    return loss_terms(Empty(), value, model=model or nn.Identity(), batch=batch or {"x": torch.zeros(4, 2)}, **how)


def test_a_single_loss_is_the_term_called_loss():
    loss = Loss(number(), 3)
    assert terms(loss) == {"loss": loss}


def test_several_losses_keep_their_names_and_order():
    several = {"tokens": Loss(number(), 3), "router": Loss(number(), torch.tensor(4))}
    result = terms(MappingProxyType(several))
    assert list(result.items()) == list(several.items())
    assert type(result) is dict


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_sum_of_one_element_is_one_number(shape):
    assert list(terms(Loss(number(2.0, *shape), torch.ones(shape)))) == ["loss"]


@pytest.mark.parametrize("count", [5, 5.0, torch.tensor(5)], ids=repr)
def test_a_mean_with_its_count_becomes_a_sum(count):
    (loss,) = terms((number(2.0), count)).values()
    assert (loss.sum.item(), float(loss.count)) == (10.0, 5.0)
    assert loss.sum.requires_grad


def test_a_plain_mean_is_weighted_by_rows():
    (loss,) = terms(number(2.0)).values()
    assert (loss.sum.item(), loss.count) == (8.0, 4)


def test_a_mean_over_nothing_adds_nothing():
    mean = number(float("nan"))
    (loss,) = terms((mean, 0)).values()
    assert loss.sum.item() == 0.0


def test_a_mean_in_half_precision_becomes_a_sum_in_float32():
    (loss,) = terms((number(1.0).to(torch.bfloat16), 1001)).values()
    assert loss.sum.item() == 1001.0


def test_a_mean_that_is_not_a_number_stays_visible():
    (loss,) = terms((number(float("nan")), 3)).values()
    assert loss.sum.isnan()


@pytest.mark.parametrize(
    ("value", "by_rows"), [(number(), True), ((number(), 3), False), (Loss(number(), 3), False), (None, False)]
)
def test_only_a_plain_mean_is_weighted_by_rows(value, by_rows):
    assert weighted_by_rows(value, model=nn.Identity(), batch={"x": torch.zeros(4)}) is by_rows


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "NoneType"),
        ({}, "dict"),
        ({"a": number()}, "dict"),
        (2.0, "float"),
        ((number(), 1, 2), "tuple"),
        (number(2.0, 3), "Tensor"),
    ],
)
def test_another_value_is_refused_with_what_to_return(value, kind):
    with pytest.raises(TaskError, match=rf"loss\(\) returned a {kind}\. Try: return brimful\.Loss"):
        terms(value)


@pytest.mark.parametrize(
    "value", [(number(), None), (2.0, 3), (number(), torch.ones(2, 3))], ids=["none", "float", "logits"]
)
def test_a_pair_that_is_not_a_mean_and_a_count_is_refused(value):
    with pytest.raises(TaskError, match="a mean and a count"):
        terms(value)


@pytest.mark.parametrize(
    "total", [torch.tensor(2.0), number(2.0, 3), 2.0, number(2.0, 0)], ids=["no graph", "3", "float", "0"]
)
def test_a_sum_that_cannot_be_trained_is_refused(total):
    with pytest.raises(TaskError, match=r"Loss\.sum must be one number that depends on trainable weights"):
        terms(Loss(total, 3))


def test_a_faulty_term_is_named():
    with pytest.raises(TaskError, match=r"'router': Loss\.sum must be one number"):
        terms({"tokens": Loss(number(), 1), "router": Loss(torch.tensor(1.0), 1)})


def test_evaluation_accepts_a_sum_without_a_graph():
    assert list(terms(Loss(torch.tensor(2.0), 3), needs_grad=False)) == ["loss"]


def test_evaluation_needs_one_number_too():
    with pytest.raises(TaskError):
        terms(Loss(torch.ones(3), 3), needs_grad=False)


@pytest.mark.parametrize("count", [None, torch.ones(2), "5", [5], {"n": 5}], ids=str)
def test_a_count_that_is_not_one_number_is_refused(count):
    with pytest.raises(TaskError, match=r"Loss\.count must be one number"):
        terms(Loss(number(), count))


def test_logged_numbers_are_detached():
    logged = terms(Loss(number(), 3, log={"accuracy": number(0.5), "margin": 2.0}))["loss"].log
    assert {name: float(value) for name, value in logged.items()} == {"accuracy": 0.5, "margin": 2.0}
    assert not logged["accuracy"].requires_grad


def test_a_logged_value_that_is_not_one_number_is_refused():
    with pytest.raises(TaskError, match=r"Loss\.log must hold one number"):
        terms(Loss(number(), 3, log={"accuracy": torch.ones(2)}))


def test_counts_are_plain_numbers_by_name():
    counts = term_counts(Empty(), {"tokens": torch.tensor(12), "rows": 3, "pairs": torch.tensor([0.5])})
    assert counts == {"tokens": 12.0, "rows": 3.0, "pairs": 0.5}
    assert {type(value) for value in counts.values()} == {float}


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "a NoneType"), ({}, "a dict"), (5, "an int"), ([("a", 1)], "a list")]
)
def test_counts_without_names_are_refused(value, kind):
    with pytest.raises(TaskError, match=rf"counts\(\) returned {kind}"):
        term_counts(Empty(), value)


@pytest.mark.parametrize("count", [torch.ones(2), None, "many"], ids=["two", "none", "text"])
def test_a_count_of_a_term_that_is_not_one_number_is_refused(count):
    with pytest.raises(TaskError, match="one number for each term"):
        term_counts(Empty(), {"tokens": count})


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ({"x": torch.zeros(3, 2), "y": [torch.zeros(3)]}, 3),
        (UserDict(x=torch.zeros(2), name="a"), 2),
        (torch.zeros(5), 5),
    ],
)
def test_the_rows_of_a_batch_are_the_dimension_its_tensors_share(batch, rows):
    assert rows_of(batch) == rows


@pytest.mark.parametrize("batch", [{}, {"x": torch.zeros(3), "y": torch.zeros(2)}, "text"], ids=["none", "two", "text"])
def test_a_batch_whose_tensors_share_no_dimension_is_refused(batch):
    with pytest.raises(TaskError, match="share their first dimension"):
        rows_of(batch)


# Hugging Face models: the count is what the model's own mean runs over.

TINY = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
DECODER = {"vocab_size": 30, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}


def gpt2():
    config = transformers.GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def bart_decoder():
    config = transformers.BartConfig(**DECODER, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8)
    return transformers.BartForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bert_masked():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TINY))


def bert_tokens():
    return transformers.BertForTokenClassification(transformers.BertConfig(**TINY, num_labels=30))


def bert_rows():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, num_labels=3))


def labelled(model) -> dict[str, torch.Tensor]:
    """Six rows of 2 to 7 tokens, the padding ignored; one label a row for a classifier of rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(2, 8)
    ids = torch.randint(5, 30, (6, 7), generator=generator)
    mask = (torch.arange(7) < lengths[:, None]).long()
    labels = lengths % 3 if type(model).__name__.endswith("SequenceClassification") else ids.where(mask == 1, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sum_and_count(model, batch) -> tuple[float, float]:
    with torch.no_grad():
        (loss,) = terms(model(**batch), model, batch, needs_grad=False).values()
    return loss.sum.item(), float(loss.count)


@pytest.mark.parametrize("make", [gpt2, llama, bart_decoder, t5, bert_masked, bert_tokens, bert_rows])
def test_the_sums_of_two_parts_of_a_hugging_face_batch_add_up_to_that_of_the_whole(make):
    torch.manual_seed(0)
    model = make().double().eval()
    batch = labelled(model)
    whole, parts = (
        sum_and_count(model, batch),
        [sum_and_count(model, {key: value[rows] for key, value in batch.items()}) for rows in (slice(2), slice(2, 6))],
    )
    assert sum(count for _, count in parts) == whole[1]
    assert sum(total for total, _ in parts) == pytest.approx(whole[0], rel=1e-6)
    assert not weighted_by_rows(model(**batch), model=model, batch=batch)


def test_a_hugging_face_output_without_labels_to_count_is_weighted_by_rows():
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, num_labels=1))
    batch = {"input_ids": torch.ones(4, 3, dtype=torch.long), "labels": torch.rand(4)}
    output = model(**batch)
    assert weighted_by_rows(output, model=model, batch=batch)
    assert float(terms(output, model, batch)["loss"].count) == 4


def test_a_hugging_face_batch_whose_labels_are_all_ignored_adds_no_loss_and_no_gradient():
    model = gpt2()
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.full((2, 4), -100)}
    (loss,) = terms(model(**batch), model, batch).values()
    loss.sum.backward()
    assert (loss.sum.item(), float(loss.count)) == (0.0, 0.0)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
