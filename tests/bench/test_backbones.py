"""A suite of kind image-encoder: features as `transformers` gives them, at a size the backbone was not trained at."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from torch.nn import functional

from mergeway.bench.suite import load_suite
from mergeway.bench.suites import check_suite
from mergeway.errors import OptionError
from mergeway.model.kinds import kind_of
from mergeway.train import Training, finetune


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tiny.backbone_suite(tmp_path_factory.mktemp("backbone") / "suite")
    suite = load_suite(where)
    finetune(suite, "bright", where / "experts" / "bright", Training(steps=12, lr=1e-2, batch=12))
    finetune(suite, "red", where / "experts" / "red", Training(steps=12, lr=2e-2, batch=12, lora=2))
    return tiny.with_experts(where)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_features_are_those_of_transformers(tmp_path, pooling):
    from transformers import AutoModel

    suite = load_suite(tiny.backbone_suite(tmp_path / "suite", pooling))
    samples = suite.samples("red", "test")
    pixels = (samples.inputs["images"].permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(suite.base)(pixel_values=pixels).last_hidden_state
        expected = hidden[:, 0] if pooling == "cls" else hidden[:, 1:].mean(1)
        found = suite.encoder.features({}, samples.inputs)
    assert hidden.shape[1] == 1 + (tiny.SIDE // 4) ** 2
    assert torch.allclose(found, functional.normalize(expected, dim=-1), atol=1e-6)


def test_positions_of_a_plain_vit_are_interpolated(tmp_path):
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    folder = tiny.backbone_suite(tmp_path / "suite")
    tiny._save(ViTModel(config).eval(), folder / "base")
    suite = load_suite(folder)
    assert suite.encoder.features({}, suite.samples("red", "test").inputs).shape == (20, 8)


def test_experts_learn_and_are_folded(folder, call):
    assert [row["classes"] for row in check_suite(folder)] == [2, 2]
    result = call("bench", folder, "--rules", "average,iso", "--orders", 1, "--json").json()
    assert result["experts"] > result["base"] + 10
    assert all(row["loss"] is not None for row in result["rows"])


def test_what_a_directory_is_taken_for(folder):
    found = kind_of(folder / "base", folder / "heads" / "red.safetensors")
    assert found["kind"] == "image-encoder" and found["pooling"] == "cls"


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [("image_size", 9, "a multiple of the patch"), ("pooling", "max", "it must be mean or cls")],
)
def test_mistakes(tmp_path, entry, value, said):
    folder = tiny.backbone_suite(tmp_path / "suite")
    suite = json.loads((folder / "suite.json").read_text())
    (folder / "suite.json").write_text(json.dumps({**suite, entry: value}))
    with pytest.raises(OptionError, match=said):
        _ = load_suite(folder).model
