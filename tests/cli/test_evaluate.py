"""`evaluate --data`: classifiers with the heads of their tasks, encoders with kept or given ones, adapters on their base."""

from __future__ import annotations

import model_kinds
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from transformers import ViTForImageClassification

import mergeway as mw


def oracle(model, x, y) -> tuple[float, float]:
    """Accuracy in percent and loss, by the classifier of transformers alone."""
    with torch.no_grad():
        pixels = (torch.as_tensor(x).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        logits = model(pixel_values=pixels).logits
    labels = torch.as_tensor(y)
    return 100 * float((logits.argmax(-1) == labels).float().mean()), float(functional.cross_entropy(logits, labels))


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Three image classifiers with heads of their own, folded into a trunk."""
    folder = tmp_path_factory.mktemp("classifiers")
    kind = model_kinds.classifier(folder)
    return kind, kind.grown(folder / "trunk", "average")


def test_a_classifier_trunk_and_its_arrivals(classifiers, tmp_path, call):
    """Every task under its own head, as its export is judged by transformers; and an arrival by itself, or on its base."""
    kind, trunk = classifiers
    words = [w for name, data in zip(kind.names, kind.data, strict=True) for w in ("--data", f"{name}={data}")]
    found = call("evaluate", trunk.path, *words, "--json").json()["tasks"]
    for name, data, arrival in zip(kind.names, kind.data, kind.arrivals, strict=True):
        with np.load(data) as file:
            x, y = file["x"], file["y"]
        exported = trunk.export(tmp_path / f"out-{name}", task=name)
        accuracy, loss = oracle(ViTForImageClassification.from_pretrained(exported), x, y)
        assert found[name]["accuracy"] == pytest.approx(accuracy)
        assert found[name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert found[name]["samples"] == 8 and found[name]["measure"] == "accuracy"
        accuracy, loss = oracle(ViTForImageClassification.from_pretrained(arrival), x, y)
        for options in ([], ["--base", kind.base]):
            alone = call("evaluate", arrival, "--data", f"{name}={data}", "--json", *options).json()["tasks"][name]
            assert (alone["accuracy"], alone["loss"]) == pytest.approx((accuracy, loss), rel=1e-5)
    out = call("evaluate", trunk.path, *words).ok().out
    assert out.splitlines()[0].split() == ["task", "samples", "accuracy", "loss"] and "mean" in out


def test_folders_have_a_test_split(classifiers, tmp_path, call):
    """Where a folder has train and test, the model is judged on test; a folder of classes is taken whole."""
    _, trunk = classifiers
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    for k, picture in enumerate(x):
        for split in ("train", "test") if k < 4 else ("train",):
            (tmp_path / "d" / split / f"c{k % 2}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(tmp_path / "d" / split / f"c{k % 2}" / f"{k}.png")
    row = call("evaluate", trunk.path, "--data", f"hue={tmp_path / 'd'}", "--json").json()["tasks"]["hue"]
    model = ViTForImageClassification.from_pretrained(trunk.export(tmp_path / "out", task="hue"))
    order = [0, 2, 1, 3]
    assert row["samples"] == 4
    assert (row["accuracy"], row["loss"]) == pytest.approx(oracle(model, x[order], [0, 0, 1, 1]), rel=1e-5)
    row = call("evaluate", trunk.path, "--data", f"hue={tmp_path / 'd' / 'train'}", "--json").json()["tasks"]["hue"]
    assert row["samples"] == 6


def test_an_encoder_needs_a_head(vision, tmp_path, call):
    """The head of a suite, one in a file, or the one that the trunk keeps with its samples: all give the suite's accuracy."""
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "ode", step=0.5)
    head, data = vision.path / "heads" / "ants.safetensors", vision.path / "data" / "ants.npz"
    trunk.add(vision.task("ants").expert, "ants", data=f"{vision.path}#ants")
    expected = call("evaluate", trunk.path, "--suite", vision.path, "--json").json()["tasks"]["ants"]
    for words in ([f"ants={vision.path}#ants"], [f"ants={data}"]):
        found = call("evaluate", trunk.path, "--data", *words, "--json").json()
        assert found["acc"] == found["tasks"]["ants"]["accuracy"] == pytest.approx(expected)
    other = ["--data", f"bees={data}"]
    assert "the task's head is needed too" in call("evaluate", trunk.path, *other).mistake()
    scored = mw.Trunk.open(trunk.path).evaluate({"bees": data}, head={"bees": head})["bees"]
    assert scored.accuracy == pytest.approx(expected)


def test_mistakes(classifiers, tmp_path, call):
    kind, trunk = classifiers
    data = f"hue={kind.data[0]}"
    for words, said in (
        ([trunk.path], "give either --suite or --data"),
        ([trunk.path, "--data", data, "--suite", "digits"], "give either --suite or --data"),
        ([trunk.path, "--data", kind.data[0]], "expected TASK=VALUE"),
        ([trunk.path, "--data", data, "--base", kind.base], "--base: a trunk has its own"),
        ([kind.base, "--data", data, "--step", "1"], "is no trunk"),
        ([trunk.path, "--data", data, "--step", "best"], "neither the number of a step nor a tag"),
        ([kind.base / "model.safetensors", "--data", data], "nothing says how to run it"),
        ([trunk.path, "--data", "hue=nowhere.npz"], "no such file or directory"),
    ):
        assert said in call("evaluate", *words).mistake()
