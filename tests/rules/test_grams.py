"""The Gram matrices of a text encoder: what a layer was fed for every token that is one, and nothing for padding."""

from __future__ import annotations

from dataclasses import replace

import tiny
import torch
from safetensors.torch import load_file

from mergeway.bench.suite import load_suite
from mergeway.calibration.statistics import gram_matrices


def test_padding_is_no_input(tmp_path):
    suite = load_suite(tiny.text_suite(tmp_path / "suite"))
    task = suite.tasks[0]
    samples, params = suite.samples(task.name, "train"), load_file(task.expert / "model.safetensors")
    # The tiny suite's sentences are all as long as each other, so they are cut to several lengths.
    lengths, places = 2 + torch.arange(len(samples)) % 3, torch.arange(samples.inputs["input_ids"].shape[1])
    assert lengths.max() < len(places)
    mask = (places < lengths[:, None]).long()
    samples = replace(samples, inputs={**samples.inputs, "attention_mask": mask})
    found = gram_matrices(suite.model, params, samples)
    model = suite.model.module
    layer = next(n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "query" in n)
    heard: list[torch.Tensor] = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, x: heard.append(x[0][0].double()))
    try:
        with torch.no_grad():
            for i, length in enumerate(lengths.tolist()):
                alone = {k: v[i : i + 1, :length] for k, v in samples.inputs.items()}
                suite.model(params, alone, samples.head)
    finally:
        handle.remove()
    rows = torch.cat(heard)
    assert len(rows) == int(lengths.sum())
    torch.testing.assert_close(found[f"{layer}.weight"].double(), rows.mT @ rows / len(rows), rtol=1e-4, atol=1e-6)
