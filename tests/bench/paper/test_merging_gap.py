"""The merging gap against losses of transformers' own model, a literal OPCM in NumPy, and central differences."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch.nn import functional

import mergeway as mw
from mergeway.bench.paper import Study
from mergeway.bench.paper.memory import AT_ONCE, bytes_by_tasks
from mergeway.bench.paper.merging_gap import gaps_of, merging_gaps

TASKS, TRAIN = ("ants", "bees", "cats"), 24


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return mw.load_suite(tiny.vision_suite(tmp_path_factory.mktemp("suite"), TASKS, train=TRAIN))


@pytest.fixture(scope="module")
def updates(suite):
    base = load_file(suite.base / "model.safetensors")
    experts = [load_file(suite.task(name).expert / "model.safetensors") for name in TASKS]
    return base, [{n: (e[n] - base[n]).double().numpy() for n in base} for e in experts]


def study(suite, out, rules=("average",)):
    return Study(suite, out, list(rules), list(rules), [3], orders=1, samples=3 * TRAIN)


def own_parts(rule, deltas):
    """What each task adds to the merged update: by the printed equations, with full singular vectors."""
    if rule == "average":
        return [{n: d / len(deltas) for n, d in delta.items()} for delta in deltas]
    total = {n: np.zeros_like(d) for n, d in deltas[0].items()}
    parts = []
    for delta in deltas:
        part = {}
        for n, d in delta.items():
            part[n] = d
            if n.endswith("weight") and d.ndim == 2 and "embedding" not in n and total[n].any():
                u, s, vt = np.linalg.svd(total[n])
                kept = s > 1e-6 * s[0]
                inner = u.T @ d @ vt.T
                size = int(kept.sum())
                rank = int((np.cumsum(s[kept]) <= 0.5 * s[kept].sum()).sum())
                inner[range(size), range(size)] = 0
                inner[:rank, :rank] = 0
                part[n] = u @ inner @ vt
        parts.append(part)
        total = {n: total[n] + part[n] for n in total}
    length = np.sqrt(sum((t**2).sum() for t in total.values()))
    mean = np.mean([np.sqrt(sum((d**2).sum() for d in delta.values())) for delta in deltas])
    return [{n: p * (mean / length) for n, p in part.items()} for part in parts]


@pytest.mark.parametrize("rule", ["average", "opcm"])
def test_gaps(suite, updates, tmp_path, rule):
    from transformers import CLIPVisionModelWithProjection

    base, deltas = updates
    parts = own_parts(rule, deltas)
    tower = CLIPVisionModelWithProjection.from_pretrained(suite.base).eval().double()

    def loss(task, update, share=1.0):
        data = np.load(suite.path / "data" / f"{task}.npz")
        pixels = (torch.from_numpy(data["x_train"]).permute(0, 3, 1, 2).double() / 255 - 0.5) / 0.5
        tower.load_state_dict({n: base[n].double() + share * torch.from_numpy(update[n]) for n in base}, strict=False)
        head = load_file(suite.path / "heads" / f"{task}.safetensors")["weight"].double()
        with torch.no_grad():
            features = functional.normalize(tower(pixel_values=pixels).image_embeds, dim=-1)
        scale = suite.settings["logit_scale"]
        return float(functional.cross_entropy(scale * features @ head.T, torch.from_numpy(data["y_train"])))

    merged = {n: sum(part[n] for part in parts) for n in base}
    found = gaps_of(study(suite, tmp_path), rule, list(TASKS), 0)
    assert list(found) == list(TASKS)
    for task, part in zip(TASKS, parts, strict=True):
        others = {n: merged[n] - part[n] for n in base}
        gap = loss(task, merged) - loss(task, part)
        slope = (loss(task, others, 1e-4) - loss(task, others, -1e-4)) / 2e-4
        assert found[task] == pytest.approx((gap, slope), rel=2e-3, abs=1e-4)
        assert abs(gap) > 1e-3 < abs(slope)


def test_the_table(suite, tmp_path):
    """Two rows for each rule that deploys a sum, and nothing is worked out twice; other rules have no parts."""
    made = merging_gaps(study(suite, tmp_path, ("ties", "opcm", "average")))
    assert [row[:2] for row in made.rows] == [
        [rule, form] for rule in ("opcm", "average") for form in ("G, Eq. 12", "first order, Eq. 13")
    ]
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "kept").iterdir()}
    assert merging_gaps(study(suite, tmp_path, ("ties", "opcm", "average"))).texts() == made.texts()
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "kept").iterdir()} == written


def test_what_is_held(suite, tmp_path):
    """Float32 tensors of a tiny tower: all experts grow with the tasks, a rule's sum does not."""
    one = sum(t.numel() * t.element_size() for t in load_file(suite.base / "model.safetensors").values())
    held = bytes_by_tasks(study(suite, tmp_path, ("average", "opcm", "ode")))
    assert held[AT_ONCE] == [2 * one, 3 * one, 4 * one]
    assert list(held) == [AT_ONCE, "average", "opcm"]
    floats = sum(4 * t.numel() for t in load_file(suite.base / "model.safetensors").values() if t.is_floating_point())
    assert held["average"] == held["opcm"] == [2 * one + floats] * 3
