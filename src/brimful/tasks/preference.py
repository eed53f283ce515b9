"""The built-in task `dpo`: a language model learns which of two replies is preferred, with one model in memory.

    rows.jsonl ─ prompt, chosen, rejected ─► token store ─► log-probabilities of both replies ─► loss of each pair
                                                └► reference-HASH.npy: the same by the reference, computed once

The reference of DPO, IPO and hinge is the model as it begins. Its log-probabilities are computed before the first step and
kept in a file, so it takes no memory in training (`reference.py`). ORPO and SimPO need none.

With h = [log π(chosen) − log π_ref(chosen)] − [log π(rejected) − log π_ref(rejected)] the losses of a pair are

    sigmoid   −log σ(β h); with a label smoothing ε this is cDPO: −(1 − ε) log σ(β h) − ε log σ(−β h)
    ipo       (h − 1 / 2β)²
    hinge     max(0, 1 − β h)
    simpo     −log σ(β (log π(chosen) − log π(rejected) − margin))
    orpo      −log π(chosen) − β log σ(log odds(chosen) − log odds(rejected)), where odds are π / (1 − π)

Length-normalised, log π is the mean over the tokens of a reply instead of their sum. IPO, SimPO and ORPO are by default.

A pair is a row and a step minimises the mean over its pairs, so any split of a step gives the same gradient. Learning rates:
5e-7 for all weights of a causal model, which is usual for DPO with AdamW; 5e-6 for adapters and for an encoder-decoder, which
is smaller; 8e-6 with ORPO, whose loss includes that of fine-tuning. A step has 64 pairs.

The command line reads the options from here, so torch is imported inside functions only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from brimful.errors import BadData, BadOption
from brimful.task import Dataset, Loss
from brimful.tasks.language import TRY_MODEL, Sft, SftOptions
from brimful.tasks.pair_batches import REFERENCE
from brimful.training.run import is_missing
from brimful.units import is_number

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn

    from brimful.tasks.pair_batches import CausalPairs, EncoderDecoderPairs
    from brimful.tasks.reference import PairRows

PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "orpo", "simpo"]
WITHOUT_REFERENCE = ("orpo", "simpo")
NORMALISED = ("ipo", "orpo", "simpo")
"""Losses that are length-normalised unless the user says otherwise."""
SMOOTHED = ("sigmoid", "simpo")
FULL_RATE, SMALL_RATE, ORPO_RATE = 5e-7, 5e-6, 8e-6
BETA, SIMPO_BETA, SIMPO_MARGIN = 0.1, 2.0, 0.5
ROUNDED = 8
"""Times the precision of a log-probability by which it differs in another batch: the reference was computed in others."""


@dataclass(frozen=True, kw_only=True)
class DpoOptions(SftOptions):
    """The options of `dpo`: those of `sft`, and what the loss is."""

    loss: PreferenceLoss = "sigmoid"
    """Loss of a pair: sigmoid is DPO. orpo and simpo need no reference."""
    beta: float | None = None
    """How much the model may move away from the reference, less with a larger value; for orpo the weight of the odds ratio.
    Default: 0.1, for simpo 2."""
    label_smoothing: float = 0.0
    """Share of the pairs that is taken to be the wrong way round (cDPO), for sigmoid and simpo. Evaluation never smooths."""
    length_normalised: bool | None = None
    """Mean log-probability of the tokens of a reply instead of their sum. Default: on for ipo, orpo and simpo."""
    margin: float | None = None
    """By how much simpo wants chosen to exceed rejected, in log-probability per token (its γ / β). Default: 0.5."""
    reference: str | None = field(default=None, metadata={"path": True})
    """Reference model: a folder, a run, or owner/name. Default: the model as it begins."""

    def _problems(self) -> Iterator[str]:
        if self.model is None:
            yield f"dpo needs a model that was fine-tuned, and model= is missing. {TRY_MODEL}"
        yield from (one for one in super()._problems() if not one.startswith("sft needs"))
        if self.loss not in get_args(PreferenceLoss):
            yield f"loss={self.loss!r} must be one of {', '.join(get_args(PreferenceLoss))}."
            return
        if self.beta is not None and not (is_number(self.beta) and self.beta > 0):
            yield f"beta={self.beta!r} must be positive."
        if self.label_smoothing and self.loss not in SMOOTHED:
            yield f"label_smoothing= has no meaning for loss={self.loss!r}. Try: loss='sigmoid'."
        elif is_number(self.label_smoothing) and 0.5 <= self.label_smoothing < 1:
            yield f"label_smoothing={self.label_smoothing!r} must be below 0.5: half of the pairs the wrong way round teach nothing."
        if self.margin is not None and self.loss != "simpo":
            yield f"margin= is for loss='simpo', not for {self.loss!r}. Try: leave it out."
        elif self.margin is not None and not is_number(self.margin):
            yield f"margin={self.margin!r} must be a number."
        if self.reference is not None and self.loss in WITHOUT_REFERENCE:
            yield f"reference= cannot be used with loss={self.loss!r}, which has none. Try: leave it out."
        elif self.reference is not None and (not self.reference or is_missing(self.reference)):
            yield f"reference={self.reference!r} does not exist. Try: a model folder, a run, or owner/name."
        if self.train_on is not None:
            yield "train_on= is for sft: preferences are about replies. Try: leave it out."

    @classmethod
    def on_resume(cls, values: dict[str, Any], run: Path) -> dict[str, Any]:
        """A run that continues has the log-probabilities of its reference in a file, and no need for the model."""
        values = super().on_resume(values, run)
        gone = values.get("reference") and is_missing(values["reference"])
        return {**values, "reference": None} if gone else values


def without_dropout(model: "nn.Module") -> "nn.Module":
    """The same model, which drops nothing, in its adapter neither: no activation, no attention weight, no layer. Its
    configuration keeps what it says."""
    from torch.nn.modules.dropout import _DropoutNd

    for part in model.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        for name, _ in _dropouts(vars(part)):
            setattr(part, name, 0.0)
    return model


def _dropouts(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What a module or a configuration of transformers drops: `activation_dropout`, `attn_pdrop`, `encoder_layerdrop`, …"""
    others = ("classifier", "summary")  # heads that a language model does not have
    for name, value in values.items():
        if "drop" in name and isinstance(value, float) and not name.startswith(others):
            yield name, value


class Dpo(Sft):
    """Teaches a fine-tuned model which of two replies to a prompt is preferred."""

    name = "dpo"
    Options = DpoOptions
    options: DpoOptions
    reads_pairs: ClassVar[bool] = True
    scores: Sequence[str] | None = ("accuracy", "margin", "logp_chosen")
    family: "CausalPairs | EncoderDecoderPairs"

    def __init__(self, options: DpoOptions | None = None) -> None:
        super().__init__(options)
        own = self.options
        simpo, normalised = own.loss == "simpo", own.length_normalised
        self.global_batch = 64
        self.work_follows_shape = False  # the shape has the longer reply; the other one costs less
        self.beta: float = own.beta if own.beta is not None else SIMPO_BETA if simpo else BETA
        self.margin: float = own.margin if own.margin is not None else SIMPO_MARGIN if simpo else 0.0
        self.length_normalised: bool = own.loss in NORMALISED if normalised is None else normalised
        self.shared_prompts: tuple[int, int] | None = None
        """Prompts of the rows to evaluate on that are also in the training rows, and all of them."""

    @property
    def needs_reference(self) -> bool:
        return self.options.loss not in WITHOUT_REFERENCE

    def model(self) -> "nn.Module":
        return without_dropout(super().model())

    def initial_model(self) -> "nn.Module":
        return without_dropout(super().initial_model())

    def loss(self, model: "nn.Module", batch: Any) -> Loss:
        policy = self.family.log_probabilities(model, batch)
        smoothing = self.options.label_smoothing if model.training else 0.0
        losses, log = self.pair_losses(policy, batch[REFERENCE].to(policy.dtype), batch["lengths"], smoothing)
        return Loss(sum=losses.sum(), count=len(losses), log=log)

    def pair_losses(
        self, policy: "Tensor", reference: "Tensor", lengths: "Tensor", label_smoothing: float = 0.0
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        """The loss of each pair and what is logged, from log-probabilities summed over each reply, [pair, 2]."""
        tokens = lengths.clamp(min=1).to(policy.dtype)
        if self.length_normalised:
            policy_used, reference_used = policy / tokens, reference / tokens
        else:
            policy_used, reference_used = policy, reference
        if not self.needs_reference:
            reference_used = reference_used * 0.0
        moved = policy_used - reference_used
        losses = self._losses(policy_used, moved[:, 0] - moved[:, 1], label_smoothing)
        return losses, self._log(self.beta * moved.detach(), policy.detach(), reference, tokens)

    def _losses(self, policy: "Tensor", apart: "Tensor", label_smoothing: float) -> "Tensor":
        import torch
        import torch.nn.functional as F

        if self.options.loss == "ipo":
            return (apart - 1 / (2 * self.beta)) ** 2
        if self.options.loss == "hinge":
            return F.relu(1 - self.beta * apart)
        if self.options.loss == "orpo":
            below_one = policy.clamp(max=-torch.finfo(policy.dtype).eps)
            odds = below_one - torch.log(-torch.expm1(below_one))
            return -policy[:, 0] - self.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
        scaled = self.beta * (apart - self.margin)
        return -(1 - label_smoothing) * F.logsigmoid(scaled) - label_smoothing * F.logsigmoid(-scaled)

    def _log(self, rewards: "Tensor", policy: "Tensor", reference: "Tensor", tokens: "Tensor") -> "dict[str, Tensor]":
        """Means over the pairs. Rewards that are equal up to rounding count as half right, so that a model begins at 0.5."""
        import torch

        chosen, rejected = rewards.unbind(1)
        scale = policy / tokens if self.length_normalised else policy
        rounding = ROUNDED * torch.finfo(policy.dtype).eps * self.beta * scale.abs().amax(1)
        equal = (chosen - rejected).abs() <= rounding
        right = torch.where(equal, 0.5, (chosen > rejected).to(rewards.dtype))
        log = {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "margin": (chosen - rejected).mean(),
            "accuracy": right.mean(),
            "logp_chosen": (policy[:, 0] / tokens[:, 0]).mean(),
        }
        if self.needs_reference:
            log["kl"] = ((reference - policy) / tokens).mean()
        return log

    def rows(self, data: str) -> "PairRows":
        from brimful.tasks.reference import PairRows

        return PairRows(super().rows(data), causal=self.family.causal)

    def prepare(
        self, data: str, folder: Path, progress: Callable[[str], object], like: Dataset | None = None, name: str = "train"
    ) -> str:  # fmt: skip
        store = super().prepare(data, folder, progress, like=like, name=name)
        if like is not None:
            from brimful.tasks.reference import shared_prompts

            self.shared_prompts = shared_prompts(like, store)
        return store

    def row_texts(self, tokenizer: "Tokenizer", row: Any) -> Sequence[tuple[str, bool | str]]:
        from brimful.tasks.pair_data import named_texts

        return named_texts(tokenizer, row)

    def before_training(self, model: "nn.Module", rows: Dataset, context: Any) -> None:
        """The log-probabilities that the reference gives to all replies, read from a file or computed into one."""
        from brimful.tasks.reference import PairRows, add_reference

        if not self.needs_reference:
            return
        if isinstance(rows, PairRows):
            add_reference(self, model, rows, context)
        elif REFERENCE not in rows[0]:
            raise BadData(
                "pairs in memory have no log-probabilities of the reference. Try: a file of pairs, or loss='simpo'."
            )

    def remarks(self, rows: Dataset) -> Sequence[tuple[str, Any, Any, str]]:
        from brimful.tasks.model_folder import text_config

        remarks = [*super().remarks(rows)]
        if self.preset is not None or self._is_pretrained():
            reason = "warning: it was never fine-tuned, and preferences cannot teach it to answer; fine-tune it with sft first"
            remarks.append(("starting weights", None, "new" if self.preset else "of pretrain", reason))
        remarks.append(("loss", self.options.loss, self._loss_words(), "of a pair"))
        dropouts = [value for _, value in _dropouts(text_config(self.config).to_dict())]
        if dropout := max([*dropouts, self.lora.dropout if self.lora else 0.0]):
            reason = "off, in the adapter too" if self.lora else "off"
            remarks.append(
                ("dropout", dropout, 0.0, f"{reason}: it would add noise to log-probabilities that are compared")
            )
        remarks.append(("reference", self.options.reference, *self._reference_remark()))
        if self.shared_prompts is not None:
            shared, every = self.shared_prompts
            reason = "warning: these rows are too easy" if shared else "no prompt to evaluate on is also trained on"
            remarks.append(("prompts shared with valid", None, f"{shared:,} of {every:,}", reason))
        return remarks

    def _is_pretrained(self) -> bool:
        """Whether the model is that of `pretrain`; of folders that others wrote nothing is known."""
        from brimful.tasks.model_folder import trained_by

        return self.source is not None and trained_by(Path(self.source)) == "pretrain"

    def _loss_words(self) -> str:
        """`sigmoid, beta 0.1`."""
        words = [self.options.loss, f"beta {self.beta:g}"]
        words += [f"margin {self.margin:g}"] if self.margin else []
        words += ["by token"] if self.length_normalised else []
        return ", ".join(words)

    def _reference_remark(self) -> tuple[str, str]:
        if not self.needs_reference:
            return "none", f"{self.options.loss} compares nothing with a reference"
        if self.options.reference:
            return (
                self.options.reference,
                "as requested; its log-probabilities are computed once, then it leaves memory",
            )
        new_adapter = self.lora is not None and self.adapter is None
        start = "the model without its adapter" if new_adapter else "the model as it begins"
        return start, "its log-probabilities are computed once, before the first step"

    def evaluate(self, model: "nn.Module", rows: Any, context: Any) -> Mapping[str, float]:
        """Over all rows of the evaluation: what the loss has logged."""
        return {name: context.logged[name] for name in self.scores or () if name in context.logged}

    def watch(self, notes: dict[str, Any], step: Mapping[str, Any]) -> Mapping[str, str]:
        """Chosen replies that become unlikely, a loss that spikes, an accuracy that stays at chance."""
        from brimful.tasks import preference_signals

        return preference_signals.watch(notes, step)

    def _family(self) -> "CausalPairs | EncoderDecoderPairs":
        from brimful.tasks.model_folder import is_causal
        from brimful.tasks.pair_batches import CausalPairs, EncoderDecoderPairs

        return (CausalPairs if is_causal(self.config) else EncoderDecoderPairs)(self.config)

    def _learning_rate(self) -> float:
        usual = SMALL_RATE if self._adapts or not self.family.causal else FULL_RATE
        return ORPO_RATE if self.options.loss == "orpo" else usual

    def reference_model(self, tokens: int) -> "nn.Module":
        """Another model as the reference, on the CPU. Refused if it does not read the same tokens, or not as many as there
        may be in the rows."""
        from brimful.tasks.language import _config, _resolved
        from brimful.tasks.model_folder import is_causal, load_model, text_config

        assert self.options.reference is not None
        folder = _resolved(self.options.reference)
        config = _config(folder)
        if is_causal(config) != self.family.causal or text_config(config).vocab_size < tokens:
            kind = "a causal model" if is_causal(config) else "an encoder-decoder"
            raise BadOption(
                f"reference={self.options.reference!r} is {kind} with {text_config(config).vocab_size:,} tokens, and the "
                f"model to train has {text_config(self.config).vocab_size:,}. Try: a reference with the same tokenizer."
            )
        self._check_tokenizer(folder)
        return load_model(folder)

    def _check_tokenizer(self, folder: str) -> None:
        """Ids of another tokenizer would be other words to the reference."""
        from brimful.data.tokenizer.folder import MODEL_FILE
        from brimful.files import file_sha256

        files = [Path(one) / MODEL_FILE for one in (folder, self.source) if one]
        if len(files) == 2 and all(file.is_file() for file in files) and len({file_sha256(one) for one in files}) == 2:
            raise BadOption(
                f"reference={self.options.reference!r} has another tokenizer than {self.source}. Try: a reference with the same tokenizer."
            )
