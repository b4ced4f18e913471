"""Holistic CMM's ablation (Table 4) and baselines (Tables 1 and 3) on a suite: every stage on or off, mean ± std over seeds.

    python benchmarks/holistic.py digits --tasks mnist,rotated,inverted --seeds 3 --epochs 3 --lr 3e-4

The accuracy is A_N, the mean over all tasks after the last (Section 5.1). Models tuned in the tangent space are judged as
tangent models. Sequential methods start each task where the last one ended; merged baselines start each from the base.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

import mergeway as mw
from mergeway.alignment import Alignment, align
from mergeway.calibration import DEFAULT_SIZE, draw
from mergeway.checkpoint import open_checkpoint
from mergeway.finetune import Finetuned, Tangent, Training, finetune
from mergeway.finetune.regularisers import running_fisher
from mergeway.suite import Suite, load_suite
from mergeway.suites import embedded

STAGES = ("fine-tuning", "+ merge", "+ merge, tangent", "+ merge, tangent, alignment", "+ merge, alignment")
RULES = {"randmix": {"scaling": 1.0}, "magmax": {}, "average": {}, "ties": {}}


class Study:
    """One suite, one seed."""

    def __init__(self, suite: Suite, tasks: list[str], training: Training, aligning: Alignment) -> None:
        self.suite, self.tasks, self.training, self.aligning = suite, tasks, training, aligning
        checkpoint = open_checkpoint(suite.base)
        self.base = {n: checkpoint.read(n).float() for n, i in checkpoint.infos.items() if i.merges}

    def accuracy(self, params: dict, tangent: bool = False) -> float:
        """A_N in percent."""
        predict = Tangent(self.suite.predictor, self.base) if tangent else self.suite.predictor
        shares = []
        with torch.no_grad():
            for name in self.tasks:
                test = self.suite.samples(name, "test")
                hits = sum(
                    int((predict(params, rows.inputs, rows.head).argmax(-1) == rows.labels).sum())
                    for rows in (test.rows(slice(i, i + 128)) for i in range(0, len(test), 128))
                )
                shares.append(100 * hits / len(test))
        return statistics.mean(shares)

    def tune(self, tasks: str | list[str], start: dict | None = None, **changes: float | bool) -> Finetuned:
        return finetune(self.suite, tasks, None, replace(self.training, **changes), start=start)

    def pipeline(self, merge: bool, tangent: bool, alignment: bool) -> float:
        """Algorithm 1 with stages left out; without merging it is sequential fine-tuning."""
        predict = Tangent(self.suite.predictor, self.base) if tangent else self.suite.predictor
        deployed, moments = self.base, None
        for number, task in enumerate(self.tasks):
            done = self.tune(task, deployed if number else None, tangent=tangent)
            previous = deployed
            if not merge or moments is None:
                deployed, moments = done.params, done.moments
                continue
            # Eq. 4 between two models is a fresh stream of two whose first brings the moments carried over.
            models = [deployed, done.params]
            deployed = mw.merge(self.base, models, "fisher", moments=[moments, done.moments])
            moments = {n: 0.6 * moments[n] + 0.4 * v for n, v in done.moments.items()}
            if alignment:
                samples = draw(self.suite.samples(task, "train"), DEFAULT_SIZE)
                deployed = deployed | align(predict, deployed, previous, samples, self.aligning).moved
        return self.accuracy(deployed, tangent)

    def regularised(self, **changes: float) -> float:
        """LwF or EWC: each task from the last one's end."""
        params, fisher = None, {}
        for task in self.tasks:
            done = _with_fisher(self, task, params, fisher, changes)
            params, fisher = done
        return self.accuracy(params or self.base)

    def rows(self) -> dict[str, float]:
        """Every method's A_N."""
        made = {"zero-shot": self.accuracy(self.base), "joint": self.accuracy(self.tune(self.tasks).params)}
        experts = [self.tune(task).params for task in self.tasks]
        for rule, options in RULES.items():
            made[rule] = self.accuracy(mw.merge(self.base, experts, rule, **options))
        made["lwf"] = self.regularised(lwf=0.3)
        made["ewc"] = self.regularised(ewc=1e6)
        for stage, flags in zip(STAGES, ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1)), strict=True):
            made[stage] = self.pipeline(*map(bool, flags))
        return made


def _with_fisher(study: Study, task: str, params: dict | None, fisher: dict, changes: dict) -> tuple[dict, dict]:
    """One task under LwF or EWC; the Fisher information goes from task to task as a file would carry it."""
    if not changes.get("ewc"):
        return study.tune(task, params, **changes).params, {}
    import tempfile

    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        start = None
        if params is not None:
            start = Path(folder)
            save_file({n: t.contiguous() for n, t in params.items()}, start / "model.safetensors")
            save_file(fisher, start / "fisher.safetensors")
        done = finetune(study.suite, task, None, replace(study.training, **changes), start=start)
    data = [study.suite.samples(task, "train")]
    return done.params, running_fisher(study.suite.predictor, done.params, data, fisher)


def main() -> None:
    """Run the seeds, print the table, keep every number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite")
    parser.add_argument("--tasks", default="all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--align-lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("holistic.json"))
    given = parser.parse_args()
    suite = load_suite(given.suite if Path(given.suite).exists() else embedded(given.suite))
    tasks = [t.name for t in suite.tasks] if given.tasks == "all" else given.tasks.split(",")
    kept = json.loads(given.out.read_text()) if given.out.exists() else {}
    for seed in range(given.seeds):
        if str(seed) not in kept:
            started = time.perf_counter()
            training = Training(epochs=given.epochs, lr=given.lr, seed=seed)
            kept[str(seed)] = Study(suite, tasks, training, Alignment(lr=given.align_lr, seed=seed)).rows()
            given.out.write_text(json.dumps(kept, indent=1))
            print(f"seed {seed}: {time.perf_counter() - started:.0f} s", flush=True)
    print(f"| method | A_N, {len(kept)} seeds |\n|---|---|")
    for name in next(iter(kept.values())):
        values = [row[name] for row in kept.values()]
        print(f"| {name} | {statistics.mean(values):.1f} ± {statistics.pstdev(values):.1f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
