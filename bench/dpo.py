"""Preference training: Brimful with one model in memory against two models in plain Hugging Face (T5) and against TRL (causal).

On the H200, each call under 4 minutes. Keep the folder between calls: models and tokens are made by the first one.

    python bench/dpo.py --models t5 --limits 20GiB --folder /tmp/dpo --output $OUT/dpo.jsonl
    python bench/dpo.py --models qwen2.5-0.5b --contestants brimful,trl --limits 20GiB --folder /tmp/dpo --output $OUT/dpo.jsonl
    python bench/dpo.py --models qwen2.5-0.5b --contestants trl-tuned --limits 20GiB --folder /tmp/dpo --output $OUT/dpo.jsonl
    python bench/dpo.py --prepare --folder /tmp/dpo     makes models and tokens
    python bench/dpo.py --learn --part sft --limits 20GiB --folder /tmp/dpo      fine-tunes T5 base on the real rows
    python bench/dpo.py --learn --part rejects --limits 20GiB --folder /tmp/dpo  its own answers to 1,000 prompts are rejected
    python bench/dpo.py --learn --part dpo --limits 20GiB --folder /tmp/dpo --output $OUT/learn.json
    python bench/dpo.py --tiny --seconds 2             a dry run of small models, also on a CPU; also with --learn
    python bench/dpo.py --table dpo.jsonl              the tables of earlier calls

    brimful     no setting: batch, packing and kernels are its plan's
    two-models  policy and reference in memory, padded, all logits, the prompt encoded once for each reply, as TRL 0.7 did
                for encoder-decoders; bf16 autocast; the best of some batch sizes
    trl         `DPOTrainer` at its defaults; after an out-of-memory error half the batch, …
    trl-tuned   the best of a grid of batch sizes, precomputed reference, checkpointing and padding-free batches

Every contestant runs in a process of its own below the same cap (`set_per_process_memory_fraction`), with its settings one after
the other; one that dies costs the line of the setting it was at. All have the same weights,
the same pairs in the same steps of 64, DPO with beta 0.1, AdamW at a constant rate, gradients clipped to 1 and no dropout; all
weights are trained (Brimful by itself would leave the encoder of T5 as it is).
**pairs/s** is the median over the second half of the steps, without the first three if there are more. **peak** and
**reserved** are the most since training began. **reference** is what it took before the first step: plan, compilation and the
log-probabilities of the reference; without it is **pairs/s**. **apart** is the largest difference of the first three losses
from Brimful's. **OOMs** are all that the process met. Of pairs, chosen is the real answer and rejected that of another row.
"""

import argparse
import copy
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brimful.errors import in_one_line
from train import _cap, _caps, _device, _device_name, _show_cap, _some_of, python_path, read_results, still_needed

MODELS = ("t5", "qwen2.5-0.5b")
CONTESTANTS = {"t5": ("brimful", "two-models"), "qwen2.5-0.5b": ("brimful", "trl", "trl-tuned")}
PRECOMPUTED, NO_CHECKPOINTING = {"precompute_ref_log_probs": True}, {"gradient_checkpointing": False}
GRID: dict[str, dict[str, Any]] = {
    "batch 8, precomputed": {"batch": 8, **PRECOMPUTED, **NO_CHECKPOINTING},
    "batch 4, precomputed, padding-free": {"batch": 4, **PRECOMPUTED, **NO_CHECKPOINTING, "padding_free": True},
    "batch 4, precomputed": {"batch": 4, **PRECOMPUTED, **NO_CHECKPOINTING},
    "batch 16, precomputed, checkpointing": {"batch": 16, **PRECOMPUTED, "gradient_checkpointing": True},
    "batch 8, precomputed, checkpointing": {"batch": 8, **PRECOMPUTED, "gradient_checkpointing": True},
    "batch 4, reference in memory": {"batch": 4, **NO_CHECKPOINTING},
}
"""Settings of TRL that an expert would try, those first that promise most."""
LADDERS = ("trl",)
"""A user tries its settings until one runs. Of the others all are tried."""
GLOBAL_BATCH, TINY_BATCH = 64, 8
BETA, LEARNING_RATE, CLIP, IGNORED = 0.1, 1e-6, 1.0, -100
PAIRS, TINY_PAIRS, LEARN_PROMPTS, HELD_BACK = 3000, 64, 1000, 200
SFT_RATE = 1e-3
"""Of `--learn`, for new weights: at 5e-4 the loss of T5 base had come from 10.8 to no less than 7.4 after 20 epochs. DPO has
the task's own, 5e-6. For chatlm-tiny in 68 steps on 108 pairs, on a CPU, rates between a 600th and a 60th of that of SFT gave
an accuracy of 0.99 on the pairs and 0.96 on 26 others, and perplexities 0.4 to 5 % lower; a 15th gave 0.81 on the others, a
third 0.65 and a perplexity 38 % higher. A beta of 0.5 instead of 0.1 halves that rise and does not help the accuracy."""
WARMUP_STEPS, COMPARED_STEPS = 3, 3
KILL_S = 240.0
ROOT = Path(__file__).resolve().parents[1]


def settings(contestant: str) -> list[tuple[str, dict[str, Any]]]:
    """What a contestant runs, in order."""
    if contestant == "brimful":
        return [("no setting", {})]
    if contestant == "two-models":
        return [(f"batch {batch}", {"batch": batch}) for batch in (16, 8, 4, 2)]
    if contestant == "trl":
        return [("defaults", {}), *((f"batch {batch}", {"batch": batch}) for batch in (4, 2, 1))]
    return list(GRID.items())


# ---- Models and pairs ------------------------------------------------------------------------------------------------


def prepare(model: str, folder: Path, chat_rows: Path, *, tiny: bool) -> None:
    """Model with tokenizer, pairs and their token store, unless they are there."""
    import sft_cases
    from brimful.tasks.language import LanguageOptions, Pretrain
    from brimful.tasks.preference import Dpo, DpoOptions

    folder.mkdir(parents=True, exist_ok=True)
    rows = sft_cases.read_pairs(chat_rows)[: TINY_PAIRS if tiny else PAIRS]
    target, file = model_folder(model, folder, tiny), folder / f"pairs{'-tiny' if tiny else ''}.jsonl"
    if not file.is_file():
        write_pairs(rows, file)
    if (
        model == "t5" and not target.exists()
    ):  # a step from scratch, since that makes weights and tokenizer as a user would
        import brimful

        run = folder / f"t5-run{'-tiny' if tiny else ''}"
        shutil.rmtree(run, ignore_errors=True)  # of a call that was cut off
        task = Pretrain(LanguageOptions(model="chatlm-tiny" if tiny else "chatlm-base"))
        brimful.train(
            task,
            str(chat_rows),
            run=run,
            max_steps=1,
            lr=1e-9,
            global_batch=TINY_BATCH,
            compile="off",
            quiet=True,
            cache=False,
        )
        _without_dropout((run / "model").resolve(), target)
    elif model != "t5" and not (target / "config.json").is_file():
        tokenizer = folder / f"tokenizer{'-tiny' if tiny else ''}"
        if not (tokenizer / "tokenizer_config.json").is_file():
            sft_cases.train_tokenizer(rows, tokenizer, 1000 if tiny else sft_cases.VOCABULARY)
        sft_cases.write_model(sft_cases.MODELS[model].config(tiny), target, tokenizer)
    note = store_note(model, folder, tiny)
    if not note.is_file():
        task = Dpo(DpoOptions(model=str(target)))
        note.write_text(str(task.prepare(str(file), folder / f"stores-{model}", lambda phrase: None)))


def _without_dropout(made: Path, target: Path) -> None:
    """TRL switches dropout off for DPO, and losses are comparable only without it."""
    draft = target.with_suffix(".part")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(made, draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "dropout_rate": 0.0}))
    draft.rename(target)  # its presence says that it is complete


def write_pairs(rows: list[tuple[str, str]], file: Path) -> None:
    """Rejected is the answer of the next row that has another one."""
    with file.open("w", encoding="utf-8") as out:
        for (prompt, chosen), (_, rejected) in zip(rows, rows[1:] + rows[:1], strict=True):
            if chosen != rejected:
                out.write(
                    json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}, ensure_ascii=False) + "\n"
                )


def model_folder(model: str, folder: Path, tiny: bool) -> Path:
    return folder / f"{model}-model{'-tiny' if tiny else ''}"


def store_note(model: str, folder: Path, tiny: bool) -> Path:
    return folder / f"store-{model}{'-tiny' if tiny else ''}"


def stream(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The pairs of all steps in the order that Brimful draws them."""
    import numpy as np

    from brimful.data.batches import StepSampler
    from brimful.data.store import Store

    store = Store.open(job["store"], verify=False)
    sampler = StepSampler(len(store), job["global_batch"], seed=job["seed"])
    indices = np.concatenate([sampler.step(step * job["global_batch"]).rows for step in range(job["steps"])])
    return store.__getitems__(indices)


# ---- One setting, in a process of its own ----------------------------------------------------------------------------


class Enough(BaseException):
    """Ends a training."""


class Clock:
    """The loss and the time of each step. A step is over when its loss has been read, so the device has no work left."""

    def __init__(self, device: Any, steps: int, seconds: float) -> None:
        self.device, self.steps, self.seconds = device, steps, seconds
        self.created, self.before_s, self.ends, self.losses = time.perf_counter(), 0.0, [0.0], list[float]()

    def begin(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._began = time.perf_counter()
        self.before_s = self._began - self.created

    def step(self, loss: float) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ends.append(time.perf_counter() - self._began)
        self.losses.append(loss)
        if len(self.losses) >= self.steps or self.ends[-1] - self.ends[1] > self.seconds:
            raise Enough

    def figures(self, pairs: int) -> dict[str, Any]:
        import torch

        step_s = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        first = max(len(step_s) // 2, WARMUP_STEPS if len(step_s) > WARMUP_STEPS else 0)
        found = torch.cuda.memory_stats(self.device) if self.device.type == "cuda" else {}
        return {
            "pairs_per_s": pairs / statistics.median(step_s[first:] or step_s), "steps": len(step_s), "loss": self.losses,
            "reference_s": self.before_s, "peak_bytes": found.get("allocated_bytes.all.peak"),
            "reserved_bytes": found.get("reserved_bytes.all.peak"),
        }  # fmt: skip


def run_jobs(jobs: list[dict[str, Any]]) -> int:
    """One after the other, a ladder up to the first that runs."""
    import torch

    from train import _forget_accelerate

    before = dict(os.environ)
    for job in jobs:
        result = run_job(job)
        write_result(job, result)
        if job["contestant"] in LADDERS and result["status"] == "ok":
            break
        os.environ.clear()
        os.environ.update(before)
        _forget_accelerate()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Its figures, or why there are none."""

    from brimful.memory.oom import is_oom
    from sft import _ooms

    device = _device(job["device"])
    _cap(device, job["limit_bytes"])
    trainer = TRAINERS["trl" if job["contestant"].startswith("trl") else job["contestant"]]
    status, error, started, ooms = "ok", "", time.perf_counter(), _ooms(device)
    clock = Clock(device, job["steps"], job["seconds"])
    try:
        trainer(job, clock)
    except Enough:
        pass
    except Exception as raised:
        if os.environ.get("BENCH_TRACEBACK"):
            raise
        status, error = ("OOM" if is_oom(raised) else "error"), in_one_line(raised)[:500]
    if status == "ok" and not clock.losses:
        status, error = "error", "it ended without a step"
    ooms = _ooms(device) - ooms if device.type == "cuda" else int(status == "OOM")
    figures = clock.figures(job["global_batch"]) if status == "ok" else {}
    return {"status": status, "error": error, **figures, "ooms": ooms, "wall_s": time.perf_counter() - started, "device_name": _device_name(device)}  # fmt: skip


def train_with_brimful(job: dict[str, Any], clock: Clock) -> None:
    import brimful
    from brimful.tasks.preference import Dpo, DpoOptions

    class Ticks(brimful.Hook):
        def before(self, loop: Any) -> None:
            clock.begin()

        def after_step(self, loop: Any, result: Any) -> None:
            clock.step(result.loss)

    limit = {} if job["limit_bytes"] is None else {"memory_limit": job["limit_bytes"]}
    with tempfile.TemporaryDirectory(prefix="bench-dpo-") as folder:
        for file in Path(job["store"]).glob("reference-*.npy"):
            file.unlink()  # it is part of what is measured
        brimful.train(
            Dpo(DpoOptions(model=job["model_folder"], beta=BETA, freeze="none" if job["model"] == "t5" else None)), job["store"], run=f"{folder}/run", max_steps=job["steps"],
            lr=LEARNING_RATE, weight_decay=0.0, schedule="constant", warmup=0, clip_norm=CLIP, global_batch=job["global_batch"],
            device=str(clock.device), seed=job["seed"], cache=False, quiet=True, hooks=[Ticks()], **limit, **job["options"],
        )  # fmt: skip


def train_with_two_models(job: dict[str, Any], clock: Clock) -> None:
    """What a user writes without a library: the reference is a copy, and the logits of all tokens are kept."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForSeq2SeqLM

    policy = AutoModelForSeq2SeqLM.from_pretrained(job["model_folder"], dtype=torch.float32).to(clock.device).train()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    autocast = torch.autocast(clock.device.type, torch.bfloat16, enabled=clock.device.type == "cuda")

    def log_probabilities(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with autocast:
            logits = model(**batch, use_cache=False).logits
        known = batch["labels"] != IGNORED
        chosen = torch.gather(logits.float().log_softmax(-1), 2, batch["labels"].clamp(min=0)[:, :, None])[:, :, 0]
        return (chosen * known).sum(1)

    rows, size = stream(job), job["global_batch"]
    clock.begin()
    for step in range(job["steps"]):
        total = 0.0
        for at in range(step * size, (step + 1) * size, job["options"]["batch"]):
            some = rows[at : min(at + job["options"]["batch"], (step + 1) * size)]
            batch = {
                name: tensor.to(clock.device) for name, tensor in collate(some, policy.config.pad_token_id).items()
            }
            own = log_probabilities(policy, batch).chunk(2)
            with torch.no_grad():
                other = log_probabilities(reference, batch).chunk(2)
            apart = (own[0] - other[0]) - (own[1] - other[1])
            loss = -F.logsigmoid(BETA * apart).sum() / size
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(total)


def collate(rows: list[dict[str, Any]], pad_id: int) -> dict[str, Any]:
    """All chosen replies, then all rejected ones, each with its prompt."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    prompts = [torch.as_tensor(row["prompt"].astype("int64")) for row in rows] * 2
    replies = [torch.as_tensor(row[name].astype("int64")) for name in ("chosen", "rejected") for row in rows]
    return {
        "input_ids": pad_sequence(prompts, batch_first=True, padding_value=pad_id),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in prompts], batch_first=True),
        "labels": pad_sequence(replies, batch_first=True, padding_value=IGNORED),
    }


def train_with_trl(job: dict[str, Any], clock: Clock) -> None:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    options = dict(job["options"])
    batch = min(options.pop("batch", 8), job["global_batch"])
    rows = [{f"{name}_ids": row[name].tolist() for name in ("prompt", "chosen", "rejected")} for row in stream(job)]
    sums = [0.0]

    class Timed(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *more: Any, **how: Any) -> Any:
            return dataset  # it has tokens already

        def _get_train_sampler(self, *more: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *more: Any, **how: Any) -> Any:
            loss = super().training_step(*more, **how)
            sums[0] += float(loss)
            return loss

    class Ticks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            loss, sums[0] = sums[0], 0.0
            clock.step(loss)

    on_gpu = clock.device.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="bench-dpo-") as folder:
        config = DPOConfig(**{
            "output_dir": folder, "max_steps": job["steps"], "per_device_train_batch_size": batch, "beta": BETA,
            "gradient_accumulation_steps": job["global_batch"] // batch, "learning_rate": LEARNING_RATE, "weight_decay": 0.0,
            "lr_scheduler_type": "constant", "max_grad_norm": CLIP, "max_length": None, "seed": job["seed"], "use_cpu": not on_gpu,
            "bf16": on_gpu, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "log_level": "error",
            "logging_strategy": "no", "model_init_kwargs": {"dtype": "float32"}, **options,
        })  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(job["model_folder"], local_files_only=True)
        Timed(model=job["model_folder"], args=config, processing_class=tokenizer, train_dataset=Dataset.from_list(rows), callbacks=[Ticks()]).train()  # fmt: skip


TRAINERS: dict[str, Callable[[dict[str, Any], Clock], None]] = {
    "brimful": train_with_brimful, "two-models": train_with_two_models, "trl": train_with_trl,
}  # fmt: skip


# ---- The contest -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.process:
        return run_jobs(json.load(sys.stdin))
    if args.table:
        print(show_tables(read_results(args.table)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-dpo-") as scratch:
        folder = (args.folder or Path(scratch)).resolve()
        output = (args.output or folder / "dpo.jsonl").resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        if args.learn:
            return learn(args, folder, output)
        before = len(read_results(output)) if output.is_file() else 0
        for model in args.models:
            _in_process(
                f"dpo.prepare({model!r}, Path({str(folder)!r}), Path({str(args.rows.resolve())!r}), tiny={args.tiny})"
            )
            for limit in [] if args.prepare else args.limits:
                for contestant in CONTESTANTS[model]:
                    if contestant in (args.contestants or CONTESTANTS[model]):
                        _compete(args, folder, output, model, limit, contestant)
        print(show_tables(read_results(output)[before:]))
    return 0


def _in_process(code: str) -> None:
    """In a process of its own, which leaves no memory on the GPU."""
    subprocess.run([sys.executable, "-c", f"import dpo; from pathlib import Path; {code}"], env=_environment(), check=True)  # fmt: skip


def _environment() -> dict[str, str]:
    """Of all processes: growing segments, offline, and everything where it is found from any folder."""
    return {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def make_job(args: argparse.Namespace, folder: Path, output: Path, model: str, limit: int | None, contestant: str, setting: str, options: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    return {
        "model": model, "limit_bytes": limit, "contestant": contestant, "setting": setting, "settings": 1, "options": options, "seed": args.seed,
        "steps": args.steps, "seconds": args.seconds, "device": args.device, "tiny": args.tiny, "output": str(output),
        "global_batch": TINY_BATCH if args.tiny else GLOBAL_BATCH, "model_folder": str(model_folder(model, folder, args.tiny)),
        "store": store_note(model, folder, args.tiny).read_text(),
    }  # fmt: skip


def _compete(
    args: argparse.Namespace, folder: Path, output: Path, model: str, limit: int | None, contestant: str
) -> None:
    """Its settings in one process while it lives."""
    tried = settings(contestant)[: None if contestant in LADDERS else args.most_settings]
    left = [
        {**make_job(args, folder, output, model, limit, contestant, setting, options), "settings": len(tried)}
        for setting, options in tried
    ]
    lines: list[dict[str, Any]] = []
    while left := still_needed(left, lines, LADDERS):
        before, started = len(read_results(output)), time.perf_counter()
        process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--process"], stdin=subprocess.PIPE, text=True, env=_environment())  # fmt: skip
        problem = f"the process died with exit code {{}} after {KILL_S * len(left):g} s at most"
        try:
            process.communicate(json.dumps(left), timeout=KILL_S * len(left))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        lines = read_results(output)[before:]
        if left := still_needed(left, lines, LADDERS):
            write_result(left[0], {"status": "error", "error": problem.format(process.returncode), "ooms": 0, "wall_s": time.perf_counter() - started})  # fmt: skip
            lines = read_results(output)[before:]


def write_result(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Append one line to the output, and say it in short on stderr."""
    names = ("model", "limit_bytes", "contestant", "setting", "settings", "options", "seed", "tiny", "global_batch")
    with Path(job["output"]).open("a") as file:
        file.write(json.dumps({**{name: job[name] for name in names}, **result}) + "\n")
    speed = (
        f"{result['pairs_per_s']:,.1f} pairs/s" if "pairs_per_s" in result else f"{result['status']}: {result['error']}"
    )
    _say(f"{job['model']}, {_show_cap(job['limit_bytes'])}, {job['contestant']} ({job['setting']}): {speed}")


HEAD = ("", "setting", "pairs/s", "Brimful is", "peak", "reserved", "reference", "OOMs", "loss", "apart", "steps")


def show_tables(results: list[dict[str, Any]]) -> str:
    """A table for each model and limit, with the best setting of each contestant."""
    from oom_midrun import _markdown

    tables = []
    for model, limit in dict.fromkeys((one["model"], one["limit_bytes"]) for one in results):
        lines = [one for one in results if (one["model"], one["limit_bytes"]) == (model, limit)]
        table, names = [HEAD], list(dict.fromkeys(one["contestant"] for one in lines))
        best = {name: max((one for one in lines if one["contestant"] == name), key=lambda one: one.get("pairs_per_s", 0.0)) for name in names}  # fmt: skip
        table += [_cells(name, best[name], lines, best.get("brimful")) for name in names]
        device = next((one["device_name"] for one in lines if "device_name" in one), "unknown device")
        problems = [f"{one['contestant']} ({one['setting']}): {one['status']}: {one['error'][:200]}" for one in lines if one["error"]]  # fmt: skip
        title = f"{model}{' (tiny)' if lines[0]['tiny'] else ''}, {device}, limit {_show_cap(limit)}, {lines[0]['global_batch']} pairs per step"  # fmt: skip
        tables.append("\n".join([title, "", _markdown(table), "", *problems]))
    return "\n\n".join(tables)


def _cells(name: str, line: dict[str, Any], lines: list[dict[str, Any]], brimful: dict[str, Any] | None) -> tuple[str, ...]:  # fmt: skip
    ooms = str(sum(one.get("ooms", 0) for one in lines if one["contestant"] == name))
    if "pairs_per_s" not in line:
        return (name, line["status"], *["–"] * 5, ooms, *["–"] * 3)
    ratio = apart = "–"
    if brimful is not None and brimful is not line and "pairs_per_s" in brimful:
        ratio = f"{brimful['pairs_per_s'] / line['pairs_per_s']:.2f} ×"
        apart = f"{losses_apart(line, brimful):.1e}"
    gib = lambda count: "–" if count is None else f"{count / 2**30:.2f} GiB"  # noqa: E731
    return (
        name, line["setting"], f"{line['pairs_per_s']:,.1f}", ratio, gib(line["peak_bytes"]), gib(line["reserved_bytes"]),
        f"{line['reference_s']:.0f} s", ooms, f"{line['loss'][0]:.4f}", apart, str(line["steps"]),
    )  # fmt: skip


def losses_apart(line: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in list(zip(line["loss"], other["loss"], strict=False))[:COMPARED_STEPS])


# ---- What is learnt ----------------------------------------------------------------------------------------------------


def learn(args: argparse.Namespace, folder: Path, output: Path) -> int:
    """T5: fine-tuned on the rows, its own answers rejected, then DPO; accuracy on training and held-back pairs, perplexity."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in [args.part] if args.part else ["sft", "rejects", "dpo"]:
        started = time.perf_counter()
        {"sft": _learn_sft, "rejects": _learn_rejects, "dpo": _learn_dpo}[part](args, folder, output)
        _say(f"{part}: {time.perf_counter() - started:.0f} s")
    return 0


def _brimful(args: argparse.Namespace, *command: str) -> None:
    limit = args.limits[0]
    more = [] if limit is None else ["--memory-limit", f"{limit / 2**30:g}GiB"]
    device = [] if args.device == "auto" else ["--device", args.device]
    ended = subprocess.run([sys.executable, "-m", "brimful", *command, *more, *device], env=_environment(), check=False)
    if ended.returncode:
        sys.exit(f"brimful {' '.join(command[:2])} ended with exit code {ended.returncode}")


def _learn_rows(args: argparse.Namespace, folder: Path) -> str:
    """The rows, or the shortest of them for a tiny model, which learns to end such answers within a minute on a CPU."""
    if not args.tiny:
        return str(args.rows.resolve())
    import sft_cases

    file = folder / "learn-rows.jsonl"
    if not file.is_file():
        rows = sorted(sft_cases.read_pairs(args.rows), key=lambda one: len(one[0]) + len(one[1]))
        lines = [json.dumps({"prompt": prompt, "response": reply}, ensure_ascii=False) for prompt, reply in rows if len(reply) > 5]  # fmt: skip
        file.write_text("\n".join(lines[:TINY_PAIRS]) + "\n", encoding="utf-8")
    return str(file)


def _learn_sft(args: argparse.Namespace, folder: Path, _: Path) -> None:
    """No weights can be downloaded, so they are new, and all of them are trained."""
    tiny = args.tiny
    model = ["--model", "chatlm-tiny" if tiny else "chatlm-base", "--freeze", "none"]
    steps = ["--max-steps", "160", "--lr", "3e-3"] if tiny else ["--epochs", str(args.epochs), "--lr", f"{SFT_RATE:g}", "--warmup", "5%"]  # fmt: skip
    run = folder / "learn-sft"
    resume = ["--resume"] if (run / "events.jsonl").is_file() else []  # an earlier call was cut off, or did this part
    _brimful(args, "train", "sft", _learn_rows(args, folder), *model, "--run", str(run), "--global-batch", "16" if tiny else "64", *steps, *resume)  # fmt: skip


def _learn_rejects(args: argparse.Namespace, folder: Path, _: Path) -> None:
    """More prompts than are needed: of a model that has seen little, four answers in ten are dropped."""
    count = TINY_PAIRS if args.tiny else 2 * LEARN_PROMPTS
    more = ["--max-new-tokens", "32"] if args.tiny else []
    _brimful(args, "data", "rejects", str(folder / "learn-sft"), _learn_rows(args, folder), "--rows", str(count), "--output", str(folder / "rejects.jsonl"), "--overwrite", *more)  # fmt: skip


def _learn_dpo(args: argparse.Namespace, folder: Path, output: Path) -> None:
    lines = (folder / "rejects.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    held = min(HELD_BACK, len(lines) // 4)
    files = {"training": folder / "learn-train.jsonl", "held back": folder / "learn-held.jsonl"}
    files["training"].write_text("".join(lines[:-held][:LEARN_PROMPTS]), encoding="utf-8")
    files["held back"].write_text("".join(lines[-held:]), encoding="utf-8")
    run = folder / f"learn-dpo-{time.time_ns()}"
    steps = ["--max-steps", "30", "--global-batch", "8", "--lr", "3e-4"] if args.tiny else ["--epochs", str(args.dpo_epochs)]  # fmt: skip
    started = time.perf_counter()
    _brimful(args, "train", "dpo", str(files["training"]), "--model", str(folder / "learn-sft"), "--run", str(run), "--valid", str(files["held back"]), *steps)  # fmt: skip
    trained = time.perf_counter()
    result: dict[str, Any] = {"run": str(run), "device_name": _device_name(_device(args.device))}
    for name, file in files.items():
        result[name] = judge(folder / "learn-sft" / "model", run / "model", file, args.device)
    _say(f"dpo: trained in {trained - started:.0f} s, judged in {time.perf_counter() - trained:.0f} s")
    output.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def judge(before: Path, after: Path, file: Path, device_name: str) -> dict[str, float]:
    """Of pairs: how often the reward of chosen is higher, and the perplexity of chosen answers before and after."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    from brimful.data.store import Store
    from brimful.tasks.preference import Dpo, DpoOptions

    device = _device(device_name)
    with tempfile.TemporaryDirectory(prefix="bench-dpo-") as scratch:
        task = Dpo(DpoOptions(model=str(before.resolve())))
        store = Store.open(task.prepare(str(file), Path(scratch), lambda phrase: None), verify=False)
        rows = [store[index] for index in range(len(store))]
    sums = []
    for path in (before, after):
        model = AutoModelForSeq2SeqLM.from_pretrained(path.resolve(), dtype=torch.float32).to(device).eval()
        sums.append(torch.cat(list(_log_probabilities(model, rows, device))))
        del model
        gc.collect()
    tokens = sum(len(row["chosen"]) for row in rows)
    moved = sums[1] - sums[0]
    perplexities = [math.exp(-float(one[:, 0].sum()) / tokens) for one in sums]
    return {
        "pairs": len(rows), "accuracy": float((moved[:, 0] > moved[:, 1]).double().mean()), "margin": BETA * float((moved[:, 0] - moved[:, 1]).mean()),
        "perplexity_before": perplexities[0], "perplexity_after": perplexities[1], "perplexity_change": perplexities[1] / perplexities[0] - 1,
    }  # fmt: skip


def _log_probabilities(model: Any, rows: list[dict[str, Any]], device: Any) -> Iterator[Any]:
    """Of both replies, [pair, 2], in batches of 16."""
    import torch

    for at in range(0, len(rows), 16):
        batch = {
            name: tensor.to(device) for name, tensor in collate(rows[at : at + 16], model.config.pad_token_id).items()
        }
        with torch.no_grad():
            scores = model(**batch, use_cache=False).logits.float().log_softmax(-1)
        own = torch.gather(scores, 2, batch["labels"].clamp(min=0)[:, :, None])[:, :, 0] * (batch["labels"] != IGNORED)
        yield torch.stack(own.sum(1).double().cpu().chunk(2), 1)


def _say(phrase: str) -> None:
    print(phrase, file=sys.stderr, flush=True)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    names = list(dict.fromkeys(name for some in CONTESTANTS.values() for name in some))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=_some_of(list(MODELS)), default=list(MODELS), help=f"some of {', '.join(MODELS)} (all)")  # fmt: skip
    parser.add_argument("--contestants", type=_some_of(names), help=f"some of {', '.join(names)} (all)")
    parser.add_argument("--limits", type=_caps, default=[20 * 2**30], help="memory of the process, such as 20GiB,none (20GiB)")  # fmt: skip
    parser.add_argument("--rows", type=Path, default=ROOT / ".carry/chatlm/train_3k.parquet", help="chat rows with prompt and response (%(default)s)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=15.0, help="after which, from its first step on, no further step is begun (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--most-settings", type=int, metavar="N", help="try the first N settings of two-models and trl-tuned (all)"
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of pairs (%(default)s)")
    parser.add_argument("--device", default="auto", help="cuda:0 or cpu (the first GPU, else the CPU)")
    parser.add_argument("--folder", type=Path, help="keep models and tokens there, for the next call")
    parser.add_argument("--output", type=Path, help="append the results there, one JSON line for each setting")
    parser.add_argument("--prepare", action="store_true", help="only make models and tokens in --folder")
    parser.add_argument("--learn", action="store_true", help="what T5 learns, instead of how fast")
    parser.add_argument("--part", choices=("sft", "rejects", "dpo"), help="only this part of --learn (all)")
    parser.add_argument("--epochs", type=float, default=20, help="of --learn, over the rows before DPO (%(default)s)")
    parser.add_argument("--dpo-epochs", type=float, default=5, help="of --learn, over the pairs (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small models and steps of 8 pairs")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of an output file")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
