"""Small heads on frozen features: one run at a time, the same with features on the device, and packed.

    python bench/molecules.py DATA --make-rows rows.npz      prepare the molecules; only this needs RDKit
    python bench/molecules.py rows.npz --device cuda         or DATA itself, a folder with hiv.csv.gz and tox21.csv.gz
    python bench/molecules.py DATA --device cpu --small      a check of this script

Seeds × 3 datasets × 4 losses: hiv by scaffold and by size, tox21 by scaffold, 2,000 training pairs each; ECFP of 2,048
bits, head 256–128, dropout 0.1, AdamW 1e-3, weight decay 1e-5, StepLR 10/0.9, gradients clipped to 1, batches of 512 pairs,
β 0.1, λ of each method. Without early stopping, so that all ways read the molecules equally often; every way validates
after each epoch, keeps its best weights and is scored with them on the test molecules, and that time is counted.

One after the other, a sample of the runs is trained and timed, and the seconds of the grid are *scaled* from it; the packed
grid is trained whole, its search for the pack size included, and its seconds are *measured*. The serial ways are plain
PyTorch in a favourable form: features are floats before the clock starts, one forward serves both sides, the loader has no
workers to start. A packed epoch reads 2,048 pairs where a serial one reads 2,000: packed batches are always full.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from brimful.molecules.heads import Head, HeadShape, Job, Rows, dpo
from brimful.molecules.methods import METHODS
from brimful.molecules.metrics import auroc
from brimful.molecules.runner import FinishedRun
from brimful.molecules.spec import PARTS, DatasetSpec, TrainSpec
from brimful.molecules.workers import PackMessage, Share, train_share
from brimful.units import show_bytes

DATASETS = {
    "hiv-scaffold": ("hiv.csv.gz", "scaffold", (2000, 600, 1000)),
    "hiv-size": ("hiv.csv.gz", "size", (2000, 600, 1000)),
    "tox21-scaffold": ("tox21.csv.gz", "scaffold", (2000, 400, 500)),  # it has 2,957 OOD molecules
}
LOSSES = ("dpo", "bce", "mse", "hinge")
TRAINING = TrainSpec(lr=1e-3)
BATCHES = (512, 2048, 8192)
FILL = 0.85
"""The share of a GPU's free memory that packs may take."""

Pairs = Callable[[], Iterable[Sequence[Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One head of the grid."""

    data: str
    loss: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.loss}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Way:
    """The cost of one way of training, and how good its heads are."""

    name: str
    aurocs: Mapping[Run, float]
    molecules_per_s: float
    peak_bytes: int | None
    one_loss_s: float
    all_losses_s: float
    scaled: bool
    remark: str = ""


# -- molecules -----------------------------------------------------------------------------------------------------------


def rows_from(source: Path, names: Sequence[str]) -> dict[str, Rows]:
    """The datasets, from a file of --make-rows or from the molecules themselves."""
    if source.is_dir():
        return {name: prepared_rows(source, name) for name in names}
    with np.load(source) as file:
        return {name: _unpacked(file, name) for name in names}


def prepared_rows(folder: Path, name: str) -> Rows:
    from brimful.files import cache_folder
    from brimful.molecules.features.encoder import load_encoder
    from brimful.molecules.prepare import prepare, rows_with_features

    file, split, (train, valid, test) = DATASETS[name]
    spec = DatasetSpec(name=name, file=folder / file, split=split, train=train, valid=valid, test=test)
    prepared = prepare(spec, cache_folder("features"), log)
    return rows_with_features(prepared, load_encoder("ecfp"), cache_folder("features"), log)[0]


def save_rows(path: Path, rows: Mapping[str, Rows]) -> None:
    """Bits eight to a byte: 5.5 MB for the three datasets."""
    found: dict[str, Any] = {}
    for name, one in rows.items():
        found[f"{name}/bits"] = np.packbits(one.features.numpy(), axis=1)
        found |= {f"{name}/{side}/{part}": getattr(one, side)[part] for side in ("id", "ood") for part in PARTS}
    np.savez(path, **found)


def _unpacked(file: Mapping[str, Any], name: str) -> Rows:
    sides: dict[str, Any] = {side: {part: file[f"{name}/{side}/{part}"] for part in PARTS} for side in ("id", "ood")}
    return Rows(features=torch.from_numpy(np.unpackbits(file[f"{name}/bits"], axis=1)), **sides)


# -- one at a time -------------------------------------------------------------------------------------------------------


def defaults(method: str) -> dict[str, float]:
    return {name: option.default for name, option in METHODS[method].training_options.items()}


def plain_loss(name: str, in_dist: Tensor, out_dist: Tensor) -> Tensor:
    """As in a paper: all pairs are a matrix."""
    options = defaults(name)
    if name == "dpo":
        loss = F.softplus(-options["beta"] * (out_dist[None, :] - in_dist[:, None])).mean()
    elif name == "hinge":
        loss = F.relu(options["margin"] - (out_dist[None, :] - in_dist[:, None])).mean()
    elif name == "bce":
        both = F.binary_cross_entropy_with_logits
        loss = (both(in_dist, torch.zeros_like(in_dist)) + both(out_dist, torch.ones_like(out_dist))) / 2
    else:
        loss = (in_dist.square().mean() + (out_dist - 1).square().mean()) / 2
    return loss + options["lam"] * (in_dist.square().mean() + out_dist.square().mean())


def train_alone(loss: str, seed: int, epochs: int, pairs: Pairs, held: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """The test AUROC of the weights with the best validation AUROC. `held`: valid and test, ID and OOD."""
    torch.manual_seed(seed)
    device = held["test"][0].device
    head = nn.Sequential(
        nn.Linear(held["test"][0].shape[1], 256), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(head.parameters(), lr=TRAINING.lr, weight_decay=TRAINING.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, TRAINING.step_size, TRAINING.gamma)
    best, kept = -1.0, head.state_dict()
    for _ in range(epochs):
        head.train()
        for in_dist, out_dist in pairs():
            energies = head(torch.cat([in_dist, out_dist]).to(device, non_blocking=True)).squeeze(-1)
            optimizer.zero_grad()
            plain_loss(loss, energies[: len(in_dist)], energies[len(in_dist) :]).backward()
            nn.utils.clip_grad_norm_(head.parameters(), TRAINING.clip)
            optimizer.step()
        schedule.step()
        valid = score(head, held["valid"])
        if valid > best:
            best, kept = valid, copy.deepcopy(head.state_dict())
    head.load_state_dict(kept)
    return score(head, held["test"])


def score(head: nn.Module, sides: tuple[Tensor, Tensor]) -> float:
    head.eval()
    with torch.no_grad():
        found = [head(side).squeeze(-1).cpu().numpy() for side in sides]
    return auroc(*found)


def from_host(rows: Rows, batch: int, device: torch.device) -> Pairs:
    """Pairs of molecules from a loader, as in most scripts."""
    both = [rows.features[side["train"]].float() for side in (rows.id, rows.ood)]
    return lambda: DataLoader(TensorDataset(*both), batch, shuffle=True, pin_memory=device.type == "cuda")


def on_device(rows: Rows, batch: int, device: torch.device) -> Pairs:
    """The same pairs, gathered on the device."""
    both = [rows.features[side["train"]].float().to(device) for side in (rows.id, rows.ood)]

    def pairs() -> Iterator[list[Tensor]]:
        for chosen in torch.randperm(len(both[0]), device=device).split(batch):
            yield [side[chosen] for side in both]

    return pairs


def serial(
    name: str, feed: Callable[..., Pairs], batch: int, grid: Sequence[Run], rows: Mapping[str, Rows], args: Any
) -> Way:
    """A sample of the grid, one run after the other."""
    device = torch.device(args.device)
    pairs = {data: feed(one, batch, device) for data, one in rows.items()}
    held = {data: held_out(one, device) for data, one in rows.items()}
    first = grid[0]
    train_alone(first.loss, first.seed, 2, pairs[first.data], held[first.data])  # warm
    empty(device)
    seconds, aurocs = {}, {}
    for run in grid[: args.sample]:
        began = time.perf_counter()
        aurocs[run] = train_alone(run.loss, run.seed, args.epochs, pairs[run.data], held[run.data])
        seconds[run] = time.perf_counter() - began
    log(f"{name}: {sum(seconds.values()):.1f} s")
    molecules = sum(2 * len(rows[run.data].id["train"]) * args.epochs for run in seconds)
    of_dpo = [one for run, one in seconds.items() if run.loss == LOSSES[0]]
    count = len({run.seed for run in grid}) * len(rows)
    return Way(
        name=name, aurocs=aurocs, molecules_per_s=molecules / sum(seconds.values()), peak_bytes=peak(device),
        one_loss_s=count * statistics.mean(of_dpo), all_losses_s=len(grid) * statistics.mean(seconds.values()),
        scaled=len(seconds) < len(grid),
    )  # fmt: skip


def held_out(rows: Rows, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Validation and test molecules, as floats on the device."""
    features = rows.features
    return {
        part: (features[rows.id[part]].float().to(device), features[rows.ood[part]].float().to(device))
        for part in PARTS[1:]
    }


# -- packed --------------------------------------------------------------------------------------------------------------


def packed(grid: Sequence[Run], rows: Mapping[str, Rows], args: Any) -> Way:
    """The part of the grid with one loss, then all of it."""
    device = torch.device(args.device)
    list(train_share(share_of(grid[:2], rows, args, epochs=1)))  # warm
    one_loss = [run for run in grid if run.loss == LOSSES[0]]
    empty(device)
    one_loss_s, _, _ = train_packed(one_loss, rows, args)
    empty(device)
    seconds, aurocs, pack = train_packed(grid, rows, args)
    log(f"packed: {seconds:.1f} s")
    steps = -(-max(len(rows[grid[0].data].id["train"]), 1) // TRAINING.batch) * args.epochs
    return Way(
        name="packed", aurocs=aurocs, molecules_per_s=2 * TRAINING.batch * steps * len(grid) / seconds,
        peak_bytes=peak(device), one_loss_s=one_loss_s, all_losses_s=seconds, scaled=False,
        remark=f"packs of {pack.size.runs} of {pack.jobs}: {pack.size.reason}",
    )  # fmt: skip


def train_packed(
    grid: Sequence[Run], rows: Mapping[str, Rows], args: Any
) -> tuple[float, dict[Run, float], PackMessage]:
    began, done = time.perf_counter(), list[FinishedRun]()
    for message in train_share(share_of(grid, rows, args, epochs=args.epochs)):
        if isinstance(message, PackMessage):
            pack = message
        else:
            done += message.finished
    aurocs = scored(done, rows, torch.device(args.device))
    return time.perf_counter() - began, {run: aurocs[run.name] for run in grid}, pack


def share_of(grid: Sequence[Run], rows: Mapping[str, Rows], args: Any, *, epochs: int) -> Share:
    training = TrainSpec(lr=TRAINING.lr, epochs=epochs, patience=epochs)
    objectives = {name: method.objective for name, method in METHODS.items() if method.objective is not None}
    jobs = [
        Job(
            name=run.name, data=run.data, objective=objectives[run.loss], options=defaults(run.loss),
            seed=run.seed, shape=HeadShape(inputs=rows[run.data].features.shape[1]), training=training,
        )
        for run in grid
    ]  # fmt: skip
    free = int(FILL * torch.cuda.mem_get_info(args.device)[0]) if args.device.startswith("cuda") else None
    return Share(groups=[jobs], rows=rows, device=args.device, budget_bytes=free)


def scored(done: Sequence[FinishedRun], rows: Mapping[str, Rows], device: torch.device) -> dict[str, float]:
    """Test AUROCs by the name of the run."""
    held = {data: held_out(one, device)["test"] for data, one in rows.items()}
    found = {}
    for finished in done:
        head = Head(finished.job.shape)
        nn.utils.vector_to_parameters(finished.weights, head.parameters())
        found[finished.job.name] = score(head.to(device), held[finished.job.data])
    return found


# -- all pairs -----------------------------------------------------------------------------------------------------------


def all_pairs(args: Any) -> list[dict[str, Any]]:
    """dpo's loss and gradient in chunks and as a matrix: seconds, and bytes beyond the energies."""
    device, found = torch.device(args.device), []

    def chunked(in_dist: Tensor, out_dist: Tensor) -> Tensor:
        return dpo(in_dist, out_dist, torch.full((1,), 0.1, device=device)).sum()

    def matrix(in_dist: Tensor, out_dist: Tensor) -> Tensor:
        return plain_loss("dpo", in_dist[0], out_dist[0]) - 0.01 * (in_dist.square().mean() + out_dist.square().mean())

    for count in args.pairs:
        row: dict[str, Any] = {"batch": count}
        sides = [torch.randn(1, count, device=device, requires_grad=True) for _ in range(2)]
        for name, loss in (("chunked", chunked), ("matrix", matrix)):
            if name == "matrix" and count > args.largest_matrix:
                continue
            torch.autograd.grad(loss(*(side[:, :512] for side in sides)), sides)  # warm
            empty(device)
            held = peak(device) or 0
            began = time.perf_counter()
            value = loss(*sides)
            grads = torch.autograd.grad(value, sides)
            row[f"{name}_loss"] = float(value.detach())
            synchronize(device)
            row[f"{name}_s"] = time.perf_counter() - began
            row[f"{name}_bytes"] = None if (top := peak(device)) is None else top - held
            row[f"{name}_grads"] = grads
        row["apart"] = apart(row.pop("chunked_grads"), row.pop("matrix_grads", None))
        found.append(row)
    return found


def apart(ours: Sequence[Tensor], theirs: Sequence[Tensor] | None) -> float | None:
    """The largest difference of two gradients, relative to the largest slope."""
    if theirs is None:
        return None
    return max(float((one - two).abs().max() / two.abs().max()) for one, two in zip(ours, theirs, strict=True))


# -- device and tables ---------------------------------------------------------------------------------------------------


def empty(device: torch.device) -> None:
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device) -> int | None:
    """Peak allocated bytes since `empty`; unknown on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def log(phrase: str) -> None:
    print(phrase, file=sys.stderr, flush=True)


def quality(way: Way, loss: str) -> str:
    """Mean test AUROC over what was trained ± the deviation over seeds, within datasets."""
    by_data: dict[str, list[float]] = {}
    for run, value in way.aurocs.items():
        if run.loss == loss:
            by_data.setdefault(run.data, []).append(value)
    if not by_data:
        return "–"
    spread = [statistics.variance(values) for values in by_data.values() if len(values) > 1]
    mean = statistics.mean(statistics.mean(values) for values in by_data.values())
    return f"{mean:.3f} ± " + (f"{statistics.mean(spread) ** 0.5:.3f}" if spread else "–")


def shown_bytes(count: int | None) -> str:
    return "–" if count is None else show_bytes(count)


def show_ways(ways: Sequence[Way], grid: Sequence[Run]) -> None:
    used = [loss for loss in LOSSES if any(run.loss == loss for run in grid)]
    seeds, sets = len({run.seed for run in grid}), len({run.data for run in grid})
    heads = ["way", "runs trained", "molecules/s", "peak memory", f"s for {seeds} × {sets} (dpo)", f"s for {seeds} × {sets} × {len(used)}", *(f"AUROC {loss}" for loss in used), "times as fast", "AUROC against the first way, same runs"]  # fmt: skip
    print("| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), sep="\n")
    for way in ways:
        how = f"scaled from {len(way.aurocs)} runs" if way.scaled else "measured"
        shared = [value - ways[0].aurocs[run] for run, value in way.aurocs.items() if run in ways[0].aurocs]
        cells = [way.name, f"{len(way.aurocs)} of {len(grid)}", f"{way.molecules_per_s:,.0f}", shown_bytes(way.peak_bytes), f"{way.one_loss_s:,.1f}, {how}", f"{way.all_losses_s:,.1f}, {how}", *(quality(way, loss) for loss in used), f"{ways[0].all_losses_s / way.all_losses_s:.1f}", f"{statistics.mean(shared):+.4f}"]  # fmt: skip
        print("| " + " | ".join(cells) + " |")
    for way in ways:
        print(f"\n{way.name}: {way.remark}" if way.remark else "", end="\n" if way.remark else "")


def show_pairs(found: Sequence[Mapping[str, Any]]) -> None:
    print("\n| dpo, rows a side | chunked s | matrix s | chunked peak | matrix peak | gradients apart |", "|---|---|---|---|---|---|", sep="\n")  # fmt: skip
    for row in found:
        seconds = [f"{row[key]:.4f}" if key in row else "–" for key in ("chunked_s", "matrix_s")]
        peaks = [shown_bytes(row.get(key)) for key in ("chunked_bytes", "matrix_bytes")]
        gap = "–" if row["apart"] is None else f"{row['apart']:.0e}"
        print(f"| {row['batch']:,} | " + " | ".join([*seconds, *peaks, gap]) + " |")


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with hiv.csv.gz and tox21.csv.gz, or a file of --make-rows")
    parser.add_argument("--make-rows", type=Path, metavar="FILE", help="write the datasets to this file and exit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--sample", type=int, default=12, help="runs that each serial way trains; the rest is scaled")
    parser.add_argument("--largest-pairs", type=int, default=65536, help="rows a side; 5 minutes on a CPU core")
    parser.add_argument("--small", action="store_true", help="one dataset, 2 seeds, 2 losses, 3 epochs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args()
    args.names, args.losses, args.largest_matrix = list(DATASETS), LOSSES, 8192
    args.pairs = [count for count in (512 * 2**power for power in range(8)) if count <= args.largest_pairs]
    if args.small:
        args.names, args.losses, args.seeds, args.epochs, args.sample = ["tox21-scaffold"], LOSSES[:2], 2, 3, 2
        args.pairs, args.largest_matrix = [512, 1024, 2048], 1024
    return args


def main() -> None:
    args = arguments()
    rows = rows_from(args.data, args.names)
    if args.make_rows:
        save_rows(args.make_rows, rows)
        return
    grid = [Run(data=data, loss=loss, seed=seed) for seed in range(args.seeds) for loss in args.losses for data in rows]
    largest = max(len(one.id["train"]) for one in rows.values())
    ways = [serial(f"from the host, batch {batch:,}" + (f" (one of {largest:,})" if batch > largest else ""), from_host, batch, grid, rows, args) for batch in BATCHES]  # fmt: skip
    ways += [serial("features on the device, batch 512", on_device, 512, grid, rows, args), packed(grid, rows, args)]
    pairs = all_pairs(args)
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()}"  # fmt: skip
    setting = {"device": name, "torch": torch.__version__, "epochs": args.epochs, "seeds": args.seeds}
    if args.json:
        results = [{**vars(way), "aurocs": {run.name: value for run, value in way.aurocs.items()}} for way in ways]
        print(json.dumps({"bench": "molecules", **setting, "ways": results, "dpo": pairs}))
        return
    print(", ".join(f"{key} {value}" for key, value in setting.items()), end="\n\n")
    show_ways(ways, grid)
    show_pairs(pairs)


if __name__ == "__main__":
    main()
