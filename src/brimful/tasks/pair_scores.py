"""How well a saved model tells chosen from rejected, for `brimful eval MODEL PAIRS`.

Rewards are those of `preference`: how much more likely a reply is than by the reference. A run of `dpo` is scored as in its
own evaluations, with its loss and against the model that it began with; `--reference` names another. Without one, a reward is
the log-probability of a reply per token: the accuracy is then the share of pairs in which the model finds the chosen reply more
likely, length aside, which is how SimPO counts.

The reference is scored first and leaves memory before the model is loaded, so there is one model at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from brimful.errors import BadOption, BadRun
from brimful.tasks.chat_scores import limits_in_training
from brimful.tasks.model_folder import is_adapter, load_model, run_of
from brimful.tasks.preference import WITHOUT_REFERENCE, Dpo, DpoOptions
from brimful.tasks.presets import PRESETS
from brimful.tasks.reference import PairRows, log_probabilities

if TYPE_CHECKING:
    import torch
    from torch import nn

    from brimful.planning.target import Target

NONE = "none"
"""For `--reference`: score without one."""
WITHOUT_ADAPTER = "the model without its adapter"
PLAIN: dict[str, Any] = {"loss": "simpo", "beta": 1.0, "margin": 0.0}
"""Options with which a reward is the log-probability per token."""


class PairEvaluation(Dpo):
    """The evaluation of a saved model on pairs."""

    name = "eval"
    continues_adapters: ClassVar[bool] = False

    def __init__(
        self,
        folder: Path,
        *,
        reference: str | None = None,
        columns: str | None = None,
        max_tokens: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        trained: Mapping[str, Any] = {}
        with suppress(BadRun):  # an unreadable run.json does not matter here
            trained = _dpo_options(folder)
        source = _reference_of(folder, trained) if reference is None else None if reference == NONE else reference
        loss = _loss_options(trained, source)
        options = DpoOptions(
            model=str(folder), reference=None if source == WITHOUT_ADAPTER else source, columns=columns,
            max_tokens=max_tokens, chat_template=chat_template, **loss,
        )  # fmt: skip
        super().__init__(options)
        self._plain = loss is PLAIN
        self.folder, self.reference = folder, source
        self.dtype: torch.dtype | None = None
        """Of the weights. Default: float32."""
        limits = None if max_tokens else limits_in_training(folder, len(self.max_tokens))
        self.max_tokens = limits or self.max_tokens
        self._limit_reason = "as requested" if max_tokens else "as in the model's run" if limits else "by default"
        self._facts: dict[str, Any] = {}

    def initial_model(self) -> "nn.Module":
        return load_model(self.folder, dtype=self.dtype)

    def prepare(
        self, data: str, folder: Path, progress: Callable[[str], object], like: Any = None, name: str = "eval"
    ) -> str:
        store = super().prepare(data, folder, progress, like, name)
        if store == data:
            self._limit_reason = "when the token store was made"
        return store

    def rows(self, data: str) -> PairRows:
        rows = super().rows(data)
        sides = 1 if self.family.causal else 2  # of a causal pair, prompt and longer reply have one limit
        limits = dict(list(rows.meta.max_tokens.items())[:sides])
        self._facts = {"max_tokens": limits, "truncated": rows.meta.truncated, "max_tokens_reason": self._limit_reason}
        return rows

    def add_reference(
        self, rows: PairRows, indices: Sequence[int], target: "Target", seed: int, progress: Callable[[str], object]
    ) -> None:
        """Give these rows the log-probabilities of the reference, which is in memory only in here."""
        from brimful.memory.oom import empty_cache
        from brimful.planning.target import autocast_dtype
        from brimful.step.distributed import SingleProcess
        from brimful.training.evaluate import EvalContext

        if self.reference is None:
            return
        without_adapter = self.reference == WITHOUT_ADAPTER
        model: Any = self.initial_model() if without_adapter else self.reference_model(rows.meta.vocab_size)
        autocast = autocast_dtype(self.precision, target.device)
        values = np.zeros((len(rows), 2))
        with target.hold(model), model.disable_adapter() if without_adapter else nullcontext():
            context = EvalContext(
                model,
                target.device,
                autocast,
                target.limit_bytes,
                target.fill,
                seed,
                SingleProcess(),
                progress,
                progress,
            )
            values[list(indices)] = log_probabilities(self, model, rows, context, indices)
        del model, context
        empty_cache(target.device)
        rows.use_reference(values)

    def evaluate(self, model: "nn.Module", rows: Any, context: Any) -> Mapping[str, float]:
        return dict(context.logged)

    def facts(self) -> dict[str, Any]:
        """How the scores came about. A plain comparison has no loss."""
        facts = {**self._facts, "reference": self.reference, "preference_loss": self._loss_words(), "signatures": {}}
        return {**facts, "loss": None, "preference_loss": None} if self._plain else facts


def _dpo_options(folder: Path) -> Mapping[str, Any]:
    """The options of the `dpo` run that a model comes from; empty if it comes from none."""
    run = run_of(folder)
    request = None if run is None else run.read_request()
    return {} if request is None or request.task != Dpo.name else request.task_options


def _reference_of(folder: Path, trained: Mapping[str, Any]) -> str | None:
    """What the rewards of the model's own run were relative to; None without such a run."""
    if not trained or trained.get("loss") in WITHOUT_REFERENCE:
        return None
    if trained.get("lora") and is_adapter(folder) and not trained.get("reference"):
        return WITHOUT_ADAPTER
    source = str(trained.get("reference") or trained.get("model"))
    if source in PRESETS:
        raise BadOption(
            f"the run of {folder} began with new weights, which are its reference and were not kept. Try: reference='{NONE}'."
        )
    return source


def _loss_options(trained: Mapping[str, Any], reference: str | None) -> dict[str, Any]:
    """Those of the run where they fit the reference, else the defaults of DPO, or none of a loss at all."""
    own = {name: trained[name] for name in ("loss", "beta", "margin", "length_normalised") if name in trained}
    needs_none = own.get("loss") in WITHOUT_REFERENCE
    if trained and needs_none == (reference is None):
        return own
    return PLAIN if reference is None else {}
