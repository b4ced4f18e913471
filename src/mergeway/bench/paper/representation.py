"""Holistic CMM Figures 5 to 7: t-SNE of a class's features under the model before the last merge and after it.

Deviates: both panels are one embedding, so that the previous model's points stand still between them; the classes are three
of the suite's, drawn by seed, and the pictures are test pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mergeway.bench.paper import style
from mergeway.bench.paper.methods import one_thread, protocol
from mergeway.bench.paper.pipeline import Params, Stages, Stream, settings_of
from mergeway.bench.paper.study import Study
from mergeway.errors import OptionError
from mergeway.model.model import Encoder
from mergeway.train import Tangent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = 3
Embedded = dict[str, Any]  # "class", the points of "previous", "merged" and "aligned", and two distances


def before_and_after(study: Study, number: int) -> Figure:
    """One class: previous model and merged model on the left, previous and aligned on the right."""
    found = study.kept(f"holistic-features-{study.longest}", protocol(study, 0), lambda: embedded_features(study))
    shown = found["classes"][number % len(found["classes"])]
    figure = style.new_figure(7.2, 3.3)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    before = np.array(shown["previous"])
    for axes, key, title in zip(panels, ("merged", "aligned"), ("before alignment", "after alignment"), strict=True):
        after = np.array(shown[key])
        axes.scatter(*before.T, s=22, facecolors="none", edgecolors=style.COLOURS[0], label="previous model")
        axes.scatter(*after.T, s=18, marker="^", color=style.COLOURS[1], alpha=0.75, linewidths=0, label=f"{key} model")
        axes.set_title(f"{title}: distance {shown[f'{key} distance']:.3g}")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2, handletextpad=0.2)
    figure.suptitle(f"Class {shown['class']}, last merge of {study.longest} tasks", fontsize=10)
    figure.tight_layout()
    return figure


def embedded_features(study: Study) -> dict[str, list[Embedded]]:
    """Three classes' features in the plane under three models, and how far the models' features are apart."""
    tasks = [t.name for t in study.suite.tasks[: study.longest]]
    with one_thread():
        stream = Stream(study.suite, tasks, *settings_of(study.suite, 0))
        *_, last = stream.pipeline(Stages("fisher", tangent=True, align=True))
        models = {"previous": last.previous, "merged": last.merged, "aligned": last.deployed}
        reading = stream.reading(tangent=True)
        labels, features = _features(study, reading, models, tasks)
        classes = np.unique(labels)
        drawn = np.random.default_rng(0).permutation(classes)[:FIGURES]
        return {"classes": [_embed(int(c), {k: f[labels == c] for k, f in features.items()}) for c in drawn]}


def _features(
    study: Study, reading: Encoder | Tangent, models: Mapping[str, Params], tasks: list[str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    tests = [study.suite.samples(task, "test").rows(slice(study.suite.tests)) for task in tasks]
    labels = torch.cat([t.labels for t in tests]).numpy()
    with torch.no_grad():
        features = {
            name: torch.cat([reading.embed(params, t.rows(i).inputs) for t in tests for i in _batches(len(t))]).numpy()
            for name, params in models.items()
        }
    return labels, features


def _batches(count: int) -> list[slice]:
    return [slice(start, start + 64) for start in range(0, count, 64)]


def _embed(label: int, features: dict[str, np.ndarray]) -> Embedded:
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise OptionError("t-SNE needs scikit-learn; install it with: pip install 'mergeway[figures]'") from None
    together = np.concatenate(list(features.values()))
    near = min(30.0, (len(together) - 1) / 3)
    plane = TSNE(perplexity=near, init="pca", random_state=0).fit_transform(together)
    points = dict(zip(features, np.split(plane.round(3), len(features)), strict=True))
    apart = {
        f"{name} distance": float(np.linalg.norm(features[name] - features["previous"], axis=1).mean())
        for name in ("merged", "aligned")
    }
    return {"class": label, **{name: p.tolist() for name, p in points.items()}, **apart}
