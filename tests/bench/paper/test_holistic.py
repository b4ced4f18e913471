"""The tables and figures of Holistic CMM on tiny incremental suites: made, kept, the same whatever the number of processes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

import mergeway as mw
import mergeway.bench.paper.icarl as icarl_module
from mergeway.bench.paper import Study, choose
from mergeway.bench.paper.interpolation import POINTS, sweep_between
from mergeway.bench.paper.methods import PIECES, results
from mergeway.bench.paper.pipeline import Stream, settings_of, ties_at_once
from mergeway.bench.paper.strategies import CITED
from mergeway.bench.suite import load_suite
from mergeway.bench.suites import split_suite
from mergeway.calibration.alignment import Alignment, align
from mergeway.errors import OptionError
from mergeway.train import Tangent, Training, finetune

TRAINING = {"epochs": 2, "lr": 3e-3, "batch": 8}
FIGURES = ("holistic-1", "holistic-2", "holistic-3", "holistic-4", "holistic-5", "holistic-6", "holistic-7")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.vision_suite(tmp_path_factory.mktemp("tower"), ("one",), train=1, test=1) / "base"


def make_suite(base, folder, by):
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 36), ("test", 24)):
        labels = np.arange(count) % 6
        pictures = rng.integers(0, 120, (count, tiny.SIDE, tiny.SIDE, 3)) + 20 * labels[:, None, None, None]
        domains = np.array(["chalk", "ink", "oil"])[np.arange(count) // 6 % 3]
        arrays |= {f"x_{split}": pictures.astype(np.uint8), f"y_{split}": labels, f"domain_{split}": domains}
    folder.mkdir()
    np.savez(folder / "all.npz", **arrays)
    split_suite(str(folder / "all.npz"), folder / "suite", base, by=by, tasks=3)
    described = json.loads((folder / "suite" / "suite.json").read_text())
    described |= {"name": by, "training": TRAINING, "alignment": {"lr": 0.02, "batch": 8}}
    (folder / "suite" / "suite.json").write_text(json.dumps(described))
    return folder / "suite"


@pytest.fixture(scope="module")
def cil(base, tmp_path_factory):
    return make_suite(base, tmp_path_factory.mktemp("cil") / "data", "classes")


@pytest.fixture(scope="module")
def dil(base, tmp_path_factory):
    return make_suite(base, tmp_path_factory.mktemp("dil") / "data", "domains")


@pytest.fixture(scope="module")
def made(cil, tmp_path_factory):
    """The directory with both tables of the class-incremental suite, for one seed."""
    from mergeway.cli import main

    out = tmp_path_factory.mktemp("made") / "paper"
    words = ["bench", cil, "--table", "holistic", "--orders", 1, "--out", out]
    assert main([str(word) for word in words]) == 0
    return out


def study(suite, out, orders=1):
    loaded = load_suite(suite)
    return Study(loaded, out, [], [], [len(loaded.tasks)], orders=orders)


def kept(folder):
    return {p.name: p.read_bytes() for p in (folder / "kept").iterdir()}


def test_tables_are_made_and_nothing_is_trained_twice(cil, made, call):
    first = (made / "tables" / "holistic-1.md").read_text()
    for method in ("zero-shot", "joint", "RandMix", "MaxAbs", "Avg", "TIES", "LwF", "EWC", "interpolation", "ours"):
        assert f" {method} |" in first
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (made / "kept").iterdir()}
    told = call("bench", cil, "--table", "holistic-1,holistic-4", "--orders", 1, "--out", made, "--json").json()
    assert [len(t["rows"]) for t in told["tables"]] == [13, 8]
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (made / "kept").iterdir()} == before


def test_a_killed_run_goes_on(cil, made, tmp_path):
    """A result that is lost is made again, and only that one."""
    (tmp_path / "kept").mkdir()
    for name, text in kept(made).items():
        (tmp_path / "kept" / name).write_bytes(text)
    lost = tmp_path / "kept" / "holistic-merge_tangent-3-0.json"
    text, others = lost.read_bytes(), {p: p.stat().st_mtime_ns for p in lost.parent.iterdir() if p != lost}
    lost.unlink()
    results(study(cil, tmp_path), ["merge", "merge, tangent", "ours"])
    assert lost.read_bytes() == text
    assert {p: p.stat().st_mtime_ns for p in lost.parent.iterdir() if p != lost} == others


@pytest.mark.slow
def test_processes_change_nothing(cil, made, call, tmp_path):
    call("bench", cil, "--table", "holistic", "--orders", 1, "--jobs", 2, "--out", tmp_path / "paper").ok()
    found = kept(tmp_path / "paper")
    assert len(found) == len(PIECES)
    assert found == {name: text for name, text in kept(made).items() if name in found}


def test_another_training_is_another_protocol(cil, made, tmp_path):
    other = tmp_path / "suite"
    other.mkdir()
    described = json.loads((cil / "suite.json").read_text()) | {"training": TRAINING | {"lr": 1e-3}}
    for row in described["tasks"]:
        row |= {"data": str(cil / row["data"]), "head": str(cil / row["head"])}
    (other / "suite.json").write_text(json.dumps(described))
    with pytest.raises(OptionError, match="another protocol"):
        results(study(other, made), ["merge"])


def by_hand(suite, tangent, aligned):
    """Algorithm 1 from the stages themselves; Eq. 4 is written out in NumPy."""
    base = {n: t.double().numpy() for n, t in load_file(suite.base / "model.safetensors").items()}
    tensors = {n: torch.from_numpy(a).float() for n, a in base.items()}
    training = Training(**TRAINING, tangent=tangent)
    reading = Tangent(suite.model, tensors) if tangent else suite.model
    deployed, moments = tensors, None
    for task in suite.tasks:
        done = finetune(suite, task.name, None, training, start=deployed)
        theta, v = ({n: t.double().numpy() for n, t in part.items()} for part in (done.params, done.moments))
        previous = deployed
        if moments is None:
            deployed, moments = done.params, v
            continue
        old = {n: t.double().numpy() for n, t in deployed.items()}
        total = {n: 0.4 * v[n] + 0.6 * moments[n] for n in v}
        mean = {n: (theta[n] + old[n]) / 2 for n in v}
        with np.errstate(invalid="ignore"):
            weighted = {n: (0.4 * v[n] * theta[n] + 0.6 * moments[n] * old[n]) / total[n] for n in v}
        merged = {n: np.where(total[n] > 0, weighted[n], mean[n]) for n in v}
        deployed, moments = {n: torch.from_numpy(a).float() for n, a in merged.items()}, total
        if aligned:
            data = suite.samples(task.name, "train")
            deployed = deployed | align(reading, deployed, previous, data, Alignment(lr=0.02, batch=8)).moved
    names = [t.name for t in suite.tasks]
    return {
        c: [a for a, _ in suite.judge(deployed, names, names, through=reading, classifier=c)]
        for c in ("head", "nearest-mean")
    }


@pytest.mark.parametrize(
    ("row", "tangent", "aligned"),
    [("merge", False, False), ("merge, tangent", True, False), ("merge, alignment", False, True), ("ours", True, True)],
)
def test_rows_equal_the_stages_by_hand(cil, made, row, tangent, aligned):
    found = results(study(cil, made), [row])[row][0]
    expected = by_hand(load_suite(cil), tangent, aligned)
    for classifier, accuracies in expected.items():
        # A picture between two classes may fall to either side of float32.
        np.testing.assert_allclose(found[classifier], accuracies, atol=100 / 8 + 1e-6)
        assert sum(a == b for a, b in zip(found[classifier], accuracies, strict=True)) >= 2


def test_baselines_equal_direct_calls(cil, made):
    suite = load_suite(cil)
    names = [t.name for t in suite.tasks]
    found = results(study(cil, made), ["zero-shot", "merged", "joint", "fine-tuning"])
    base = load_file(suite.base / "model.safetensors")
    assert found["zero-shot"][0]["head"] == suite.accuracies(base, names, names)
    training = Training(**TRAINING)
    experts = [finetune(suite, name, None, training).params for name in names]
    assert found["Avg"][0]["head"] == suite.accuracies(mw.merge(base, experts, "average"), names, names)
    joint = finetune(suite, names, None, training).params
    assert found["joint"][0]["head"] == suite.accuracies(joint, names, names)
    params = None
    for name in names:
        params = finetune(suite, name, None, training, start=params).params
    assert found["fine-tuning"][0]["head"] == suite.accuracies(params, names, names)


def test_ties_at_once_against_numpy():
    rng = np.random.default_rng(1)
    base = {"a": rng.normal(size=(6, 5)), "b": rng.normal(size=10)}
    experts = [{n: t + rng.normal(size=t.shape) for n, t in base.items()} for _ in range(3)]
    updates = np.array([np.concatenate([(e[n] - base[n]).ravel() for n in base]) for e in experts])
    for update in updates:
        update[np.argsort(np.abs(update))[: 40 - 8]] = 0  # a fifth of 40 entries stays
    expected = np.zeros(40)
    for i, column in enumerate(updates.T):
        agreeing = column[(column != 0) & (np.sign(column) == np.sign(column.sum()))]
        expected[i] = 0.55 * agreeing.mean() if len(agreeing) else 0
    tensors = [{n: torch.from_numpy(t) for n, t in model.items()} for model in (base, *experts)]
    merged = ties_at_once(tensors[0], tensors[1:])
    flat = np.concatenate([(merged[n].numpy() - base[n]).ravel() for n in base])
    np.testing.assert_allclose(flat, expected, atol=1e-12)


def test_ends_of_the_interpolation_are_the_models(cil, tmp_path):
    suite = load_suite(cil)
    names = [t.name for t in suite.tasks[:2]]
    one = finetune(suite, names[0], None, Training(**TRAINING))
    two = finetune(suite, names[1], None, Training(**TRAINING), start=one.params)
    found = sweep_between(study(cil, tmp_path), tangent=False, seed=0)
    for how in ("linear", "fisher"):
        assert len(found[how]) == len(POINTS)
        for at, model in ((0, one), (-1, two)):
            expected = np.mean(suite.judge(model.params, names, names), axis=0)
            np.testing.assert_allclose(found[how][at], expected, rtol=1e-4)


def test_strategies_stand_beside_the_published_figures(cil, made, call):
    told = call("bench", cil, "--table", "holistic-2", "--orders", 1, "--out", made, "--json").json()["tables"][0]
    rows = {row["method"]: row for row in told["rows"]}
    assert len(rows) == 20
    assert rows["MaPLe"]["CIFAR-100, published"]["mean"] == 74.52
    assert [m for m, row in rows.items() if row["frozen head"] is None] == list(CITED)
    assert rows["Continual-CLIP"]["frozen head"] == rows["zero-shot"]["frozen head"]
    mean = np.mean(
        [(row["CIFAR-100, published"]["mean"] + row["ImageNet-R, published"]["mean"]) / 2 for row in rows.values()]
    )
    printed = [
        72.32,
        89.24,
        79.46,
        79.54,
        79.46,
        79.75,
        50.66,
        69.69,
        75.36,
        77.95,
        78.13,
        78.21,
        79.33,
    ]  # the column Avg
    assert mean == pytest.approx(np.mean([*printed, 72.6, 74.62, 77.12, 72.49, 73.21, 66.66, 80.21]), abs=0.01)


def test_icarl_by_hand(cil, tmp_path, monkeypatch):
    """Suites on disk that hold only exemplars of the earlier tasks, which are chosen by trying every picture in NumPy."""
    monkeypatch.setattr(icarl_module, "PER_CLASS", 2)
    suite = load_suite(cil)
    names = [t.name for t in suite.tasks]
    found = icarl_module.icarl(Stream(suite, names, Training(**TRAINING), Alignment()))
    training = Training(**TRAINING, lwf=1.0, temperature=1.0)
    params, kept, described = None, {}, json.loads((cil / "suite.json").read_text())
    whole = {name: np.load(cil / "data" / f"{name}.npz") for name in names}
    for k, name in enumerate(names, 1):
        stage = written_suite(tmp_path / name, cil, described, whole, kept)
        params = finetune(stage, names[:k], None, training, start=params, learned=names[: k - 1]).params
        with torch.no_grad():
            z = suite.model.features(params, {"images": torch.from_numpy(whole[name]["x_train"])}).double().numpy()
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        labels = whole[name]["y_train"]
        kept[name] = {c: herded(z, np.flatnonzero(labels == c)) for c in np.unique(labels)}
        each = 12 // (2 * k)
        kept = {n: {c: rows[:each] for c, rows in classes.items()} for n, classes in kept.items()}
    last = written_suite(tmp_path / "last", cil, described, whole, kept)
    for classifier in ("head", "nearest-mean"):
        expected = [a for a, _ in last.judge(params, names, names, classifier=classifier)]
        np.testing.assert_allclose(found[classifier], expected, atol=100 / 8 + 1e-6)
        assert sum(a == b for a, b in zip(found[classifier], expected, strict=True)) >= 2


def herded(z, rows):
    """The greedy choice, every step by trying each picture that is left."""
    chosen = []
    while len(chosen) < len(rows):
        left = [r for r in rows if r not in chosen]
        chosen.append(min(left, key=lambda r: np.linalg.norm(z[rows].mean(0) - z[[*chosen, r]].mean(0))))
    return chosen


def written_suite(folder, cil, described, whole, kept):
    """The suite with no training pictures of a task but those that are kept."""
    (folder / "data").mkdir(parents=True)
    rows = [{**row, "head": str(cil / row["head"])} for row in described["tasks"]]
    for name, arrays in whole.items():
        index = np.concatenate(list(kept[name].values())) if name in kept else slice(None)
        some = {key: a[index] if key.endswith("train") else a for key, a in arrays.items()}
        np.savez(folder / "data" / f"{name}.npz", **some)
    (folder / "suite.json").write_text(json.dumps(described | {"tasks": rows}))
    return load_suite(folder)


@pytest.mark.slow
def test_domain_incremental(dil, call, tmp_path):
    told = call("bench", dil, "--orders", 1, "--out", tmp_path, "--table", "holistic", "--json").json()
    assert [(t["name"], len(t["rows"])) for t in told["tables"]] == [("holistic-3", 13), ("holistic-4", 8)]


def test_mismatch_is_that_of_the_stages_by_hand(cil, made):
    """d_t of the first merge of the whole pipeline, from the stages themselves and features of transformers."""
    from transformers import CLIPVisionModelWithProjection

    from mergeway.bench.paper.mismatch import found_biases

    found = found_biases(study(cil, made), 0)
    suite = load_suite(cil)
    assert len(found) == len(suite.tasks) - 1 and all(after < before for before, after in found)
    base = load_file(suite.base / "model.safetensors")
    training = Training(**TRAINING, tangent=True)
    names = [t.name for t in suite.tasks]
    first = finetune(suite, names[0], None, training)
    second = finetune(suite, names[1], None, training, start=first.params)
    merged = {}
    for n, v in second.moments.items():
        total = 0.4 * v + 0.6 * first.moments[n]
        mean = (first.params[n] + second.params[n]) / 2
        merged[n] = torch.where(
            total > 0, (0.4 * v * second.params[n] + 0.6 * first.moments[n] * first.params[n]) / total, mean
        )
    tower = CLIPVisionModelWithProjection.from_pretrained(suite.base).eval()
    mean, std = (torch.tensor(suite.settings[key])[:, None, None] for key in ("image_mean", "image_std"))
    pixels = (suite.samples(names[1], "train").inputs["images"].permute(0, 3, 1, 2).float() / 255 - mean) / std

    def at(params, share):
        tower.load_state_dict({n: base[n] + share * (params[n] - base[n]) for n in base}, strict=False)
        with torch.no_grad():
            return tower(pixel_values=pixels).image_embeds.double()

    # The tangent's features by a central difference about the base.
    away = [(at(p, 1e-2) - at(p, -1e-2)) / 2e-2 for p in (merged, first.params)]
    assert found[0][0] == pytest.approx(float((away[0] - away[1]).norm()) / len(pixels), rel=0.02)


def test_features_of_three_classes_are_kept(cil, made, call):
    call("bench", cil, "--orders", 1, "--out", made, "--figure", "holistic-5").ok()
    features = json.loads((made / "kept" / "holistic-features-3.json").read_text())["result"]["classes"]
    assert len({shown["class"] for shown in features}) == 3
    for shown in features:
        assert {len(shown[key]) for key in ("previous", "merged", "aligned")} == {4}
        assert shown["aligned distance"] != shown["merged distance"]


@pytest.mark.slow
def test_every_figure(cil, call, tmp_path):
    call("bench", cil, "--figure", "holistic", "--orders", 2, "--out", tmp_path).ok()
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {f"{n}.{s}" for n in FIGURES for s in ("png", "svg")}


def test_items_by_protocol():
    assert [item.name for item in choose("table", "holistic", "cil")] == ["holistic-1", "holistic-2", "holistic-4"]
    assert [item.name for item in choose("table", "holistic", "dil")] == ["holistic-3", "holistic-4"]
    assert not any(item.name.startswith("holistic") for item in choose("figure", "all", "task"))
    with pytest.raises(OptionError, match="table holistic-1 is about suites of protocol cil; this one's is dil"):
        choose("table", "holistic-1", "dil")
    with pytest.raises(OptionError, match="holistic-1 is about suites of protocol cil; this one's is task"):
        choose("table", "holistic", "task")


@pytest.mark.parametrize(
    ("said", "message"),
    [({"training": {"lrr": 1}}, "has no entry 'lrr'; did you mean 'lr'"), ({"alignment": 3}, "must be an object")],
)
def test_settings_are_checked(cil, said, message):
    suite = load_suite(cil)
    suite.settings = {**suite.settings, **said}
    with pytest.raises(OptionError, match=message):
        settings_of(suite, 0)
