"""How well runs do on their validation molecules: one number each, higher is better, for many runs at once.

Runs that see out-of-distribution molecules are judged by AUROC; a plain classifier, which must not, by the loss on
in-distribution molecules alone. Rows are read a step's worth at a time, so that a validation takes no more memory
than a step does.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from brimful.tasks.heads.packed.job import Job
from brimful.tasks.heads.packed.losses import cross_entropy
from brimful.tasks.heads.packed.pack import Pack


def validation_scores(pack: Pack, places: Sequence[int]) -> list[float]:
    """Of these runs of the pack, with the weights they have now."""
    judged = [pack.jobs[place] for place in places]
    weights = pack.state.weights[torch.tensor(places, device=pack.device)]
    rows, counts = _rows(pack, judged, "id")
    of_id = _outputs(pack, rows, weights)
    if not pack.shape.classes:
        beyond, beyond_counts = _rows(pack, judged, "ood")
        return auroc_of_runs(of_id, counts, _outputs(pack, beyond, weights), beyond_counts).tolist()
    labels = pack.shelf.labels[rows][..., : len(pack.shape.classes)]
    labels = torch.where((torch.arange(rows.shape[1], device=pack.device) < counts[:, None])[..., None], labels, -1)
    losses = -cross_entropy(of_id, labels).double()
    exposed = [place for place, job in enumerate(judged) if job.sees_ood]
    if exposed:
        beyond, beyond_counts = _rows(pack, [judged[place] for place in exposed], "ood")
        of_ood = _outputs(pack, beyond, weights[exposed])
        objectives = [judged[place].objective for place in exposed]
        scores = [_read(of, objectives) for of in (of_id[exposed], of_ood)]
        losses[exposed] = auroc_of_runs(scores[0], counts[exposed], scores[1], beyond_counts)
    return losses.tolist()


def auroc_of_runs(in_dist: Tensor, counts: Tensor, out_dist: Tensor, beyond_counts: Tensor) -> Tensor:
    """AUROC of each run, ties counted half; scores [runs, rows], of which the first `counts` are real."""
    real = torch.arange(in_dist.shape[1], device=in_dist.device) < counts[:, None]
    ordered, _ = torch.where(real, in_dist, torch.inf).sort(dim=1)
    queries = out_dist.contiguous()
    below = torch.searchsorted(ordered, queries)
    upto = torch.searchsorted(ordered, queries, right=True).clamp(max=counts[:, None])
    won = (below + upto).double() / 2
    asked = torch.arange(out_dist.shape[1], device=out_dist.device) < beyond_counts[:, None]
    found = torch.where(asked, won, 0).sum(1) / (counts * beyond_counts)
    broken = ~in_dist.isfinite().all(1) | ~out_dist.isfinite().all(1)
    return torch.where(broken, torch.nan, found)


def _read(logits: Tensor, objectives: Sequence[str]) -> Tensor:
    """A classifier's score, higher for OOD: the energy of runs trained on it, 1 − the largest probability of the others."""
    by_energy = torch.tensor([name == "classify-energy-oe" for name in objectives], device=logits.device)
    energy, doubt = -logits.logsumexp(-1).mean(-1), 1 - logits.softmax(-1).amax(-1).mean(-1)
    return torch.where(by_energy[:, None], energy, doubt)


def _rows(pack: Pack, jobs: Sequence[Job], side: str) -> tuple[Tensor, Tensor]:
    """The validation rows of each run, the first one repeated where others have more, and how many are real."""
    shelf = pack.shelf
    own = [shelf.first[job.data] + getattr(shelf.rows[job.data], side)["valid"] for job in jobs]
    longest = max(map(len, own))
    padded = np.stack([np.concatenate([rows, np.repeat(rows[:1], longest - len(rows))]) for rows in own])
    return torch.from_numpy(padded).to(pack.device), torch.tensor([len(rows) for rows in own], device=pack.device)


def _outputs(pack: Pack, rows: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([pack.outputs(part, weights) for part in rows.split(2 * pack.batch, dim=1)], 1)
