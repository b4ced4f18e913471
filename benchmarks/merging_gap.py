"""Is OPCM's first-order merging gap (Eq. 13) computed wrongly, or is it a poor approximation? Decided without our code.

Both forms from a tower of `transformers` in float64, a literal OPCM in NumPy and autograd, beside those of `bench --table
merging-gap`; then the gap with the other tasks' part s times as long. A first-order form is right where G(s)/s stands still.

    python benchmarks/merging_gap.py [SUITE] [--samples 64]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from ends import find_suite
from safetensors.torch import load_file
from torch.nn import functional

SHARES = (0.01, 0.1, 0.3, 1.0)


def main() -> None:
    """A line for every task, and their mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", default="digits")
    parser.add_argument("--samples", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)

    from mergeway.bench.paper import Study
    from mergeway.bench.paper.merging_gap import gaps_of
    from mergeway.bench.protocol import orders

    suite = find_suite(given.suite)
    order = orders([task.name for task in suite.tasks], 1)[0]
    study = Study(suite, Path(), ["opcm"], [], [len(order)], orders=1, samples=given.samples)
    ours = gaps_of(study, "opcm", list(order), 0)
    # The pictures and labels that were drawn are data; nothing else of the suite is asked.
    drawn = {s.task: s for s in suite.objective(list(order), size=given.samples, seed=0).tasks}
    hand = ByHand(suite.path, order, {t: (s.inputs["images"], s.labels) for t, s in drawn.items()})
    head = ("G", "Eq. 13", "ours: G", "Eq. 13", "slope at own part", *(f"G({s:g})/{s:g}" for s in SHARES))
    print("| task | " + " | ".join(head) + " |")
    rows = {task: [*hand.forms(task), *ours[task], *hand.beyond(task)] for task in order}
    for task, row in {**rows, "mean": list(np.mean(list(rows.values()), axis=0))}.items():
        print(f"| {task} | " + " | ".join(f"{value:+.3f}" for value in row) + " |")


class ByHand:
    """The losses of a stream's tasks at any point, and what each task adds to the update of OPCM at the end."""

    def __init__(
        self, folder: Path, order: tuple[str, ...], data: dict[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        from transformers import CLIPVisionModelWithProjection

        self.told = json.loads((folder / "suite.json").read_text(encoding="utf-8"))
        files = {task["name"]: task for task in self.told["tasks"]}
        self.base = {n: t.double() for n, t in load_file(folder / self.told["base"] / "model.safetensors").items()}
        experts = [load_file(folder / files[name]["expert"] / "model.safetensors") for name in order]
        self.tower = CLIPVisionModelWithProjection.from_pretrained(folder / self.told["base"]).eval().double()
        self.heads = {name: load_file(folder / files[name]["head"])["weight"].double() for name in order}
        self.data = data
        parts = own_parts([{n: (e[n].double() - b).numpy() for n, b in self.base.items()} for e in experts])
        self.parts = dict(zip(order, parts, strict=True))
        self.merged = {n: sum(part[n] for part in parts) for n in self.base}

    def at(self, task: str, own: float, others: float) -> dict[str, torch.Tensor]:
        part = self.parts[task]
        return {
            n: b + torch.from_numpy(own * part[n] + others * (self.merged[n] - part[n])) for n, b in self.base.items()
        }

    def loss(self, task: str, params: dict[str, torch.Tensor]) -> torch.Tensor:
        images, labels = self.data[task]
        mean, std = (torch.tensor(self.told[key]).double().view(1, 3, 1, 1) for key in ("image_mean", "image_std"))
        pixels = (images.permute(0, 3, 1, 2).double() / 255 - mean) / std
        found = torch.func.functional_call(self.tower, params, kwargs={"pixel_values": pixels}).image_embeds
        scores = self.told["logit_scale"] * functional.normalize(found, dim=-1) @ self.heads[task].T
        return functional.cross_entropy(scores, labels.long())

    def gap(self, task: str, share: float = 1.0) -> float:
        with torch.no_grad():
            return float(self.loss(task, self.at(task, 1, share)) - self.loss(task, self.at(task, 1, 0)))

    def slope(self, task: str, own: float) -> float:
        """The derivative of the loss along the other tasks' part, at the base or with the task's own part."""
        leaves = {n: t.requires_grad_() for n, t in self.at(task, own, 0).items()}
        self.loss(task, leaves).backward()
        others = {n: torch.from_numpy(self.merged[n] - self.parts[task][n]) for n in leaves}
        return sum(float((leaf.grad * others[n]).sum()) for n, leaf in leaves.items() if leaf.grad is not None)

    def forms(self, task: str) -> list[float]:
        return [self.gap(task), self.slope(task, 0)]

    def beyond(self, task: str) -> list[float]:
        return [self.slope(task, 1), *(self.gap(task, share) / share for share in SHARES)]


def own_parts(deltas: list[dict[str, np.ndarray]], alpha: float = 0.5) -> list[dict[str, np.ndarray]]:
    """Algorithm 1 of OPCM with full singular vectors, each task's part scaled as at the end of the stream."""
    total = {n: np.zeros_like(d) for n, d in deltas[0].items()}
    parts = []
    for delta in deltas:
        part = dict(delta)
        for n, d in delta.items():
            if n.endswith("weight") and d.ndim == 2 and "embedding" not in n and total[n].any():
                u, s, vt = np.linalg.svd(total[n])
                kept = s[s > 1e-6 * s[0]]
                inner = u.T @ d @ vt.T
                rank = int((np.cumsum(kept) <= alpha * kept.sum()).sum())
                inner[range(len(kept)), range(len(kept))] = 0
                inner[:rank, :rank] = 0
                part[n] = u @ inner @ vt
        parts.append(part)
        total = {n: total[n] + part[n] for n in total}
    length = np.sqrt(sum((t**2).sum() for t in total.values()))
    mean = np.mean([np.sqrt(sum((d**2).sum() for d in delta.values())) for delta in deltas])
    return [{n: p * (mean / length) for n, p in part.items()} for part in parts]


if __name__ == "__main__":
    main()
