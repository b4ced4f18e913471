"""A stream of small ViT classifiers, made here, each with a head of its own: folded with memory, judged, exported, loaded again."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import mergeway as mw
from mergeway.calibration.task_data import task_data
from mergeway.model.kinds import kind_of, make_model

logging.getLogger("transformers").setLevel(logging.ERROR)

CLASSES = {"hue": 2, "side": 3, "light": 2}


def pictures(task: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise in which the task's class shows: a stronger colour, a brighter third, a brighter whole."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 120, (count, 8, 8, 3)).astype(np.uint8)
    y = rng.integers(0, CLASSES[task], count)
    for image, label in zip(x, y, strict=True):
        if task == "hue":
            image[..., 2 * label] += 100
        elif task == "side":
            image[:, 3 * label : 3 * label + 2] += 100
        elif label:
            image += 100
    return x, y


def pixels(x: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A random ViT, three arrivals with heads of two, three and two classes, and their data."""
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    ViTForImageClassification(config).save_pretrained(folder / "base")
    for number, (task, classes) in enumerate(CLASSES.items()):
        x, y = pictures(task, 48, number)
        np.savez(folder / f"{task}.npz", x_train=x, y_train=y)
        model = AutoModelForImageClassification.from_pretrained(
            folder / "base", num_labels=classes, ignore_mismatched_sizes=True
        )
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(25):
            adam.zero_grad()
            model(pixel_values=pixels(x), labels=torch.from_numpy(y)).loss.backward()
            adam.step()
        model.save_pretrained(folder / task)
        torch.save(adam.state_dict(), folder / task / "optimizer.pt")
    return folder


@pytest.mark.parametrize(
    "rule", ["ode", "regmean", *(pytest.param(r, marks=pytest.mark.slow) for r in ("opcm", "fisher"))]
)
def test_vit_stream(vit, tmp_path, rule):
    trunk = mw.Trunk.create(tmp_path / "trunk", vit / "base", rule)
    for task in CLASSES:
        trunk.add(vit / task, task, data=str(vit / f"{task}.npz") if trunk.rule.needs else None)
    if rule == "ode":
        assert trunk.memory()["kind"] == "image-classification"
        assert [row["task"] for row in trunk.memory()["tasks"]] == list(CLASSES)
    trunk.export(tmp_path / "whole", backbone=True)
    heads = {t: load_file(tmp_path / "whole" / "heads" / f"{t}.safetensors") for t in CLASSES}
    shared = {n: t for n, t in trunk.params().items() if not n.startswith("classifier")}
    samples = {t: task_data(str(vit / f"{t}.npz"), None, t, vit / "base", heads[t])[1] for t in CLASSES}
    objective = mw.Objective(make_model(vit / "base", kind_of(vit / "base")), list(samples.values()))
    losses = objective.task_losses(shared)
    for task, classes in CLASSES.items():
        original = load_file(vit / task / "model.safetensors")
        assert all(torch.equal(heads[task][n], original[n]) for n in ("classifier.weight", "classifier.bias"))
        # What transformers says of the exported model with the task's head is what the objective says.
        trunk.export(tmp_path / task, task=task)
        model = AutoModelForImageClassification.from_pretrained(tmp_path / task)
        x, y = pictures(task, 48, list(CLASSES).index(task))
        logits = model(pixel_values=pixels(x)).logits
        assert logits.shape == (48, classes)
        theirs = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y))
        assert theirs.item() == pytest.approx(losses[task], rel=1e-5)
    assert trunk.verify() == []


def test_vit_as_an_adapter(vit, tmp_path):
    """peft finds the layers by the module's names, which are not those of the checkpoint; so do we when an adapter arrives."""
    peft = pytest.importorskip("peft")
    trunk = mw.Trunk.create(tmp_path / "trunk", vit / "base", "average")
    for task in CLASSES:
        trunk.add(vit / task, task)
    trunk.export_lora(tmp_path / "lora", 16, backbone=True)
    base = ViTForImageClassification.from_pretrained(vit / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "lora").merge_and_unload()
    theirs.save_pretrained(tmp_path / "merged")
    read = load_file(tmp_path / "merged" / "model.safetensors")
    folded = mw.merge(vit / "base", [tmp_path / "lora"], "average")
    origin = load_file(vit / "base" / "model.safetensors")
    linear = [n for n, t in trunk.params().items() if "encoder.layer" in n and t.ndim == 2]
    assert len(linear) == 12
    for name in linear:
        assert not torch.equal(read[name], origin[name])
        for made in (read[name], folded[name]):
            torch.testing.assert_close(made, trunk.params()[name], rtol=1e-5, atol=1e-6)


def test_moments_of_an_optimiser_that_also_knew_the_head(vit, tmp_path, call):
    """Each task's head stays its own, so its moments are passed over; the others have the names of the checkpoint."""
    trunk = mw.Trunk.create(tmp_path / "trunk", vit / "base", "fisher")
    read = {}
    for task in CLASSES:
        call("moments", vit / task, "--out", tmp_path / f"{task}.safetensors").ok()
        read[task] = load_file(tmp_path / f"{task}.safetensors")
        assert {"classifier.weight", "vit.encoder.layer.0.attention.attention.query.weight"} <= read[task].keys()
        trunk.add(vit / task, task, moments=tmp_path / f"{task}.safetensors")
    name = "vit.encoder.layer.1.output.dense.weight"
    total, weight = None, None
    for task in CLASSES:
        theta, v = load_file(vit / task / "model.safetensors")[name].double(), read[task][name].double()
        if total is None:
            total, weight = theta, v
        else:
            weight, before = 0.4 * v + 0.6 * weight, weight
            total = (0.4 * v * theta + 0.6 * before * total) / weight
    torch.testing.assert_close(trunk.params()[name].double(), total, rtol=1e-5, atol=1e-7)
