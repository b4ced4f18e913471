"""Models with running means: buffers of floats, which are merged but have no gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mergeway as mw
from mergeway.calibration.task_data import task_data


@pytest.fixture
def networks(tmp_path):
    """A convolutional base, two arrivals of other weights and other running means, and pictures for each."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
    for seed, name in enumerate(("base", "first", "second")):
        torch.manual_seed(seed)
        model = ResNetForImageClassification(ResNetConfig(image_size=16, **small))
        for own, buffer in model.named_buffers():
            if "running" in own:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
        model.save_pretrained(tmp_path / name)
        pictures = np.random.default_rng(seed).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=pictures)
    return tmp_path


@pytest.mark.parametrize(
    ("rule", "options"), [("steer", {"steps": 3, "batch": 12}), ("ode", {"step": 0.25, "guidance": 0.5})]
)
def test_they_are_folded_with_data(networks, rule, options):
    trunk = mw.Trunk.create(networks / "trunk", networks / "base", rule, **options)
    for task in ("first", "second"):
        trunk.add(networks / task, data=networks / f"{task}.npz")
    assert trunk.verify() == []
    merged = trunk.params()
    ends = [load_file(networks / name / "model.safetensors") for name in ("base", "first", "second")]
    moved = [n for n in merged if "running_mean" in n]
    assert moved and all(not torch.equal(merged[n], end[n]) for n in moved for end in ends)
    assert all(bool(torch.isfinite(t).all()) for t in merged.values())


def test_answers_are_those_of_an_arrivals_own_means(networks):
    """As transformers says them; the base's means would give others."""
    from transformers import AutoModelForImageClassification

    tensors = load_file(networks / "first" / "model.safetensors")
    params = {n: t for n, t in tensors.items() if t.is_floating_point()}
    head = {n: t for n, t in params.items() if n.startswith("classifier")}
    model, samples = task_data(str(networks / "first.npz"), None, "first", networks / "base", head)
    objective = mw.Objective(model, [samples], copies=0)
    [task] = objective.taught([1.0], lambda: params, True).tasks
    expert = AutoModelForImageClassification.from_pretrained(networks / "first").eval()
    with torch.no_grad():
        wanted = expert((task.inputs["images"].permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).logits
    torch.testing.assert_close(task.answers[:, 0].float(), wanted, rtol=2e-3, atol=2e-3)
