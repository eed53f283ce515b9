"""What the losses of TRL's trainers take from all rows of a batch, so that the loss of a part of them is still theirs.

- **KTO** subtracts an estimate of the KL divergence, the mean over all rows of a batch. `WholeBatch` makes it once, without
  gradients, from all rows of the step, and every micro-batch uses it. (At the first step the estimate is 0, and with LoRA in
  every split too, so the comparison of rows with their halves cannot see it.)
- **DPO's `sft` term** is a mean over the tokens of the chosen answers, beside terms that are means over rows. Its weight in a
  micro-batch is scaled by the share of the step's tokens.
- **DPO's `aot` terms** sort the rows of a batch, and the auxiliary loss of a mixture of experts balances all its tokens:
  `compares_rows` names them, and `exact` refuses them.
- **Metrics** are means over tokens, over rows, or over the rows with one label: `metric_weights`.
- **Packed rows** of `SFTConfig(packing=True)` hold several documents that do not see each other. One that does not fit alone
  is run in parts: `Packs`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from brimful.errors import DoesNotFit
from brimful.memory.forward import Halving
from brimful.memory.oom import OutOfMemory
from brimful.task import IGNORED

LENGTHS = "seq_lengths"
"""The column of TRL's packed rows with the lengths of their documents."""
_SORTING = ("aot", "aot_unpaired")


def compares_rows(trainer: Any) -> list[str]:
    """Why the loss of a part of the rows is not their part of the loss, in a TRL trainer with these arguments.

    Some are too small for the comparison of a few rows with their halves: at the first step, DPO's model is its reference.
    """
    sorting = ", ".join(name for name in _SORTING if name in _loss_types(trainer))
    reasons = {
        f"loss_type={sorting} sorts all rows of a batch; use another one": bool(sorting),
        "the auxiliary loss of a mixture of experts balances all tokens of a batch; use router_aux_loss_coef=0.0": bool(
            vars(trainer).get("aux_loss_enabled")
        ),
    }
    return [f"{reason}, or allow_inexact=True" for reason, applies in reasons.items() if applies]


def _loss_types(trainer: Any) -> list[str]:
    return list(vars(trainer).get("loss_types") or ())


@dataclass(frozen=True, slots=True)
class _Totals:
    rows: int = 0
    kl: torch.Tensor | None = None
    """The mean over all rows, before it is clamped."""
    chosen_tokens: float | None = None


class WholeBatch:
    """What the loss of a part of the rows has to know of all of them. Nothing, unless the trainer is KTO's or DPO's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._totals = trainer, _Totals()
        self._halving = Halving(trainer.args.device, what="KTO's KL estimate")

    @property
    def _estimates_kl(self) -> bool:
        return bool(getattr(self._trainer, "calculate_KL", False)) and hasattr(self._trainer, "_compute_kl_logps")

    @contextmanager
    def of(
        self, model: nn.Module, rows: Any, collate: Callable[[list[Any]], Any], at_once: int | None
    ) -> Iterator[None]:
        """While this is open, losses are of parts of these rows. At most `at_once` of them go through the model together."""
        parts = [rows]  # a batch that the loader collated
        if isinstance(rows, list):
            parts = [
                rows[start : start + (at_once or len(rows))] for start in range(0, len(rows), at_once or len(rows))
            ]
        try:
            if self._estimates_kl:
                self._totals = self._measure_kl(model, parts, collate)
            elif "sft" in _loss_types(self._trainer):
                batches = [collate(part) if isinstance(rows, list) else part for part in parts]
                chosen = sum(float(_completion_tokens(batch)[0].sum()) for batch in batches)
                self._totals = _Totals(rows=sum(map(_pairs, batches)), chosen_tokens=chosen)
            yield
        finally:
            self._totals = _Totals()

    @contextmanager
    def in_loss(self, inputs: Any) -> Iterator[Any]:
        """Call `compute_loss` inside this, with the inputs that it yields."""
        trainer, totals = self._trainer, self._totals
        if totals.kl is not None:
            answers = iter((totals.kl.reshape(1), totals.kl.new_zeros(1)))  # of the model, then of the reference
            if "ref_KL_logps" in inputs:
                inputs = {**inputs, "ref_KL_logps": totals.kl.new_zeros(1)}
            trainer._compute_kl_logps = lambda *_: next(answers)
            try:
                yield inputs
            finally:
                del trainer._compute_kl_logps
        elif totals.chosen_tokens:
            weights = trainer.loss_weights
            share = float(_completion_tokens(inputs)[0].sum()) / totals.chosen_tokens * totals.rows / _pairs(inputs)
            trainer.loss_weights = [
                weight * share if name == "sft" else weight
                for name, weight in zip(_loss_types(trainer), weights, strict=True)
            ]
            try:
                yield inputs
            finally:
                trainer.loss_weights = weights
        else:
            yield inputs

    def _measure_kl(self, model: nn.Module, parts: list[Any], collate: Callable[[list[Any]], Any]) -> _Totals:
        differences = []
        for part in parts:
            whole = 1 if not isinstance(part, list) else len(part)
            for _, result in self._halving.run(whole, partial(self._kl_differences, model, part, collate)):
                if isinstance(result, OutOfMemory):
                    raise DoesNotFit(
                        "KTO's KL estimate: one row does not fit in the memory that is left. Try: shorter rows, or more memory.",
                        needed_bytes=0,
                    )
                differences.append(result)
        joined = torch.cat(differences)
        return _Totals(rows=len(joined), kl=joined.mean())

    def _kl_differences(
        self, model: nn.Module, rows: Any, collate: Callable[[list[Any]], Any], some: range
    ) -> torch.Tensor:
        """Of some rows, each with the answer of another: its log-probability by the model, less that by the reference."""
        from trl.models.utils import disable_gradient_checkpointing
        from trl.trainer.utils import use_adapter

        trainer = self._trainer
        inputs = trainer._prepare_inputs(collate([rows[row] for row in some]) if isinstance(rows, list) else rows)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            own = trainer._compute_kl_logps(model, inputs)
            if trainer.precompute_ref_logps:
                return own - inputs["ref_KL_logps"]
            with ExitStack() as stack:
                stack.enter_context(
                    disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)
                )
                reference = trainer.ref_model
                if reference is None:  # the model itself, without its adapter or with the one it began with
                    unwrapped, reference = trainer.accelerator.unwrap_model(trainer.model), trainer.model
                    stack.enter_context(use_adapter(unwrapped, "ref" if "ref" in unwrapped.peft_config else None))
                return own - trainer._compute_kl_logps(reference, inputs)


def _completion_tokens(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of the chosen and of the rejected answers are predicted, in a batch of DPO."""
    chosen, rejected = inputs["completion_mask"][:, 1:].chunk(2)
    return chosen, rejected


def _pairs(inputs: Mapping[str, Any]) -> int:
    return len(inputs["completion_mask"]) // 2


def metric_weights(trainer: Any, inputs: Any) -> dict[str, float]:
    """What the numbers that a TRL loss keeps are means over, by their names. Others are means over what the loss is."""
    if "_metrics" not in vars(trainer) or not isinstance(inputs, Mapping):
        return {}
    mask, labels = inputs.get("completion_mask"), inputs.get("labels")
    if mask is None:
        if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
            return {}
        tokens = float(labels[:, 1:].ne(IGNORED).sum())
        return {"entropy": tokens, "mean_token_accuracy": tokens}
    weights = {"entropy": float(mask[:, 1:].sum())}
    if "label" not in inputs:  # DPO: first the chosen answers, then the rejected ones
        chosen, rejected = (float(half.sum()) for half in _completion_tokens(inputs))
        return weights | {"mean_token_accuracy": chosen, "logits/chosen": chosen, "logits/rejected": rejected}
    for name, rows in (("chosen", inputs["label"].bool()), ("rejected", ~inputs["label"].bool())):
        weights[f"rewards/{name}"] = weights[f"logps/{name}"] = float(rows.sum())
        weights[f"logits/{name}"] = float(mask[rows][:, 1:].sum())
    return weights


class Packs:
    """TRL's packed rows, cut into parts once one did not fit. They are not joined again before the next training."""

    def __init__(self, collator: Any) -> None:
        self.parts = 1
        self._cuts = bool(getattr(collator, "padding_free", False))

    def cut(self, rows: Any) -> Any:
        """These rows, each in up to `parts` rows with about as many tokens, cut between documents."""
        if self.parts == 1 or self._most_documents(rows) == 1:
            return rows
        return [piece for row in rows for piece in _cut(row, self.parts)]

    def cut_finer(self, rows: Any) -> bool:
        """False if every document of these rows is by itself."""
        if self.parts >= self._most_documents(rows):
            return False
        self.parts *= 2
        return True

    def _most_documents(self, rows: Any) -> int:
        if (
            not self._cuts
            or not isinstance(rows, list)
            or not all(isinstance(row, dict) and LENGTHS in row for row in rows)
        ):
            return 1
        return max(len(row[LENGTHS]) for row in rows)


def _cut(row: Mapping[str, Any], parts: int) -> Iterator[dict[str, Any]]:
    lengths = row[LENGTHS]
    starts = [0, *itertools.accumulate(lengths)]
    total = starts[-1]
    middles = [start + length / 2 for start, length in zip(starts, lengths, strict=False)]
    for _, group in itertools.groupby(range(len(lengths)), lambda place: int(parts * middles[place] / total)):
        places = list(group)
        tokens, documents = slice(starts[places[0]], starts[places[-1] + 1]), slice(places[0], places[-1] + 1)
        yield {
            name: column[documents] if name == LENGTHS else column[tokens] if _spans(column, total) else column
            for name, column in row.items()
        }


def _spans(column: Any, tokens: int) -> bool:
    return hasattr(column, "__len__") and len(column) == tokens
