"""How large the pictures of a model are, whose config may say nothing of it."""

from __future__ import annotations

import json

import pytest
import torch

from mergeway.errors import OptionError
from mergeway.model.kinds import kind_of, make_model


@pytest.fixture
def network(tmp_path):
    """A convolutional network: its config says no size."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    small = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
    ResNetForImageClassification(ResNetConfig(**small)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    "stored",
    [{"size": 16}, {"size": {"height": 16, "width": 16}}, {"crop_size": 16, "size": {"shortest_edge": 18}}, None],
    ids=str,
)
def test_the_preprocessor_says_what_the_config_does_not(network, stored):
    if stored is None:
        config = json.loads((network / "config.json").read_text())
        (network / "config.json").write_text(json.dumps(config | {"image_size": 16}))
    else:
        (network / "preprocessor_config.json").write_text(json.dumps(stored))
    assert make_model(network, kind_of(network)).image_size == 16


def test_without_a_size_there_is_one_line(network):
    with pytest.raises(OptionError, match=r'says how large pictures are; add "image_size" to config\.json'):
        _ = make_model(network, kind_of(network)).image_size
