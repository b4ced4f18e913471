"""The methods of Holistic CMM's tables, each trained once for every seed and kept on disk."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from mergeway.bench.paper.icarl import icarl
from mergeway.bench.paper.pipeline import EWC, LWF, Params, Stages, Stream, settings_of, ties_at_once
from mergeway.bench.paper.study import Study
from mergeway.bench.suite import Suite, load_suite
from mergeway.model.compute import Compute

Accuracies = dict[str, list[float]]  # of every task, by classifier

STAGES = {
    "fine-tuning": Stages(None),
    "fine-tuning, tangent": Stages(None, tangent=True),
    "interpolation": Stages("linear"),
    "merge": Stages("fisher"),
    "merge, alignment": Stages("fisher", align=True),
    "merge, tangent": Stages("fisher", tangent=True),
    "ours": Stages("fisher", tangent=True, align=True),
}
MERGED: dict[str, Callable[[Stream], Params]] = {
    "RandMix": lambda stream: stream.merged("randmix", scaling=1.0, seed=stream.training.seed),
    "MaxAbs": lambda stream: stream.merged("magmax", scaling=0.5),
    "Avg": lambda stream: stream.merged("average"),
    "TIES": lambda stream: ties_at_once(stream.base, stream.experts),
}
# What is trained together is kept together.
PIECES: dict[str, Callable[[Stream], dict[str, Accuracies]]] = {
    "zero-shot": lambda stream: {"zero-shot": stream.accuracies(stream.base)},
    "joint": lambda stream: {"joint": stream.accuracies(stream.tune(stream.tasks).params)},
    "merged": lambda stream: {name: stream.accuracies(merge(stream)) for name, merge in MERGED.items()},
    "LwF": lambda stream: {"LwF": stream.accuracies(stream.regularised(replace(stream.training, lwf=LWF)))},
    "EWC": lambda stream: {"EWC": stream.accuracies(stream.regularised(replace(stream.training, ewc=EWC)))},
    "EWC, per sample": lambda stream: {
        "EWC, per sample": stream.accuracies(
            stream.regularised(replace(stream.training, ewc=EWC, ewc_fisher="per-sample"))
        )
    },
    "iCaRL": lambda stream: {"iCaRL": icarl(stream)},
    **{name: (lambda stream, name=name: {name: _end_of(stream, STAGES[name])}) for name in STAGES},
}


def _end_of(stream: Stream, stages: Stages) -> Accuracies:
    *_, last = stream.pipeline(stages)
    return stream.accuracies(last.deployed, stages.tangent)


def results(study: Study, pieces: Sequence[str]) -> dict[str, list[Accuracies]]:
    """What the methods of these pieces reach, seed by seed; what is not on disk yet is trained."""
    # Nothing is trained for the base, so one seed of it is all.
    wanted = [(piece, seed if piece != "zero-shot" else 0) for seed in range(study.orders) for piece in pieces]
    missing = [one for one in dict.fromkeys(wanted) if not study.holds(_file(study, *one))]
    tasks = [t.name for t in study.suite.tasks[: study.longest]]
    study.progress.begin(f"training {len(missing)} streams", len(missing), "streams")
    for (piece, seed), result in _trained(study, tasks, missing):
        study.kept(_file(study, piece, seed), protocol(study, seed), result)
        study.progress.advance(1)
    found: dict[str, list[Accuracies]] = {}
    for piece, seed in wanted:
        reached = study.kept(_file(study, piece, seed), protocol(study, seed), dict[str, Accuracies])
        for name, accuracies in reached.items():
            found.setdefault(name, []).append(accuracies)
    return found


def _file(study: Study, piece: str, seed: int) -> str:
    return f"holistic-{piece}-{study.longest}-{seed}"


def protocol(study: Study, seed: int) -> dict[str, object]:
    """What a kept result depends on besides the suite."""
    training, alignment = settings_of(study.suite, seed)
    settings: dict[str, object] = {
        "training": asdict(training),
        "alignment": asdict(alignment),
        "tests": study.suite.tests,
    }
    return settings | ({"autocast": True} if study.suite.compute.autocast else {})


def _trained(
    study: Study, tasks: list[str], missing: Sequence[tuple[str, int]]
) -> Iterator[tuple[tuple[str, int], Callable[[], dict[str, Accuracies]]]]:
    """Each piece with what gives its result, as they are finished."""
    if study.jobs == 1:
        for piece, seed in missing:
            yield (piece, seed), lambda piece=piece, seed=seed: _train(study.suite, tasks, piece, seed)
        return
    # A forked copy of a process that has used torch's threads may hang in its first operation.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(study.jobs, spawn) as pool:
        where = (study.suite.path, study.suite.tests, study.suite.compute)
        futures = {pool.submit(_train_apart, where, tasks, *one): one for one in missing}
        for future in as_completed(futures):
            yield futures[future], future.result


def _train_apart(
    where: tuple[Path, int | None, Compute], tasks: list[str], piece: str, seed: int
) -> dict[str, Accuracies]:
    return _train(load_suite(*where), tasks, piece, seed)


def _train(suite: Suite, tasks: list[str], piece: str, seed: int) -> dict[str, Accuracies]:
    with one_thread():
        return PIECES[piece](Stream(suite, tasks, *settings_of(suite, seed)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Training on one thread, so that the number of processes does not change a bit of the result."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
