"""Generated checkpoints: speed and memory do not depend on what the numbers are, only on their shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path


def write_stream(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    arrivals: int,
    config: Mapping[str, object],
    step: float = 0.002,
) -> tuple[Path, list[Path]]:
    """A base and arrivals of normal numbers as model directories; those that exist are taken as they are."""
    import torch
    from safetensors.torch import save_file

    targets = [folder / "base", *(folder / f"arrival{k}" for k in range(arrivals))]
    if all((target / "config.json").exists() for target in targets):
        return targets[0], targets[1:]
    generator = torch.Generator().manual_seed(0)
    base = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for target in targets:
        model = base
        if target is not targets[0]:
            model = {n: t + step * torch.randn(t.shape, generator=generator) for n, t in base.items()}
        target.mkdir(parents=True, exist_ok=True)
        save_file(model, target / "model.safetensors", metadata={"format": "pt"})
        # Last, so that a directory with a config is a complete one.
        (target / "config.json").write_text(json.dumps(config))
    return targets[0], targets[1:]


def large_stream(folder: Path, size: tuple[int, int, int, int], arrivals: int = 2) -> tuple[Path, list[Path]]:
    """A Llama in bf16 and arrivals tuned from it, in shards of about 1 GB, never held whole; what exists is taken as it is."""
    shapes = llama_shapes(*size)
    targets = [folder / "base", *(folder / f"arrival{k}" for k in range(arrivals))]
    for number, target in enumerate(targets):
        if not (target / "config.json").exists():
            _write_shards(target, shapes, number)
            # Last, so that a directory with a config is a complete one.
            (target / "config.json").write_text(json.dumps({**llama_config(*size), "dtype": "bfloat16"}))
    return targets[0], targets[1:]


def _write_shards(target: Path, shapes: Mapping[str, tuple[int, ...]], number: int, shard: int = 10**9) -> None:
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = [[]]
    for name, shape in shapes.items():
        if files[-1] and 2 * sum(prod(shapes[n]) for n in files[-1]) + 2 * prod(shape) > shard:
            files.append([])
        files[-1].append(name)
    where = {}
    for k, names in enumerate(files, 1):
        file = f"model-{k:05d}-of-{len(files):05d}.safetensors"
        save_file({n: _drawn(n, shapes[n], number) for n in names}, target / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _drawn(name: str, shape: tuple[int, ...], number: int):
    """A tensor of the base (number 0), or the same a little moved; even numbers, since drawing them takes less time."""
    import numpy as np
    import torch

    sources = [np.random.default_rng([k, *name.encode()]) for k in sorted({0, number})]
    out = torch.empty(prod(shape), dtype=torch.bfloat16)
    for start in range(0, len(out), 1 << 22):
        some = out[start : start + (1 << 22)]
        drawn = [torch.frombuffer(bytearray(s.bytes(len(some))), dtype=torch.int8).float() for s in sources]
        some.copy_(2e-4 * drawn[0] + (2e-5 * drawn[1] if number else 0.0))
    return out.view(shape)


def llama_shapes(hidden: int, inner: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama with tied embeddings."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def llama_config(hidden: int, inner: int, layers: int, vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 512,
        "dtype": "float32",
    }


def vit_shapes(layers: int = 12) -> dict[str, tuple[int, ...]]:
    """The vision tower of CLIP ViT-B/32, or as many layers of it."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.class_embedding": (768,),
        "vision_model.embeddings.patch_embedding.weight": (768, 3, 32, 32),
        "vision_model.embeddings.position_embedding.weight": (50, 768),
    }
    norms = ["vision_model.pre_layrnorm", "vision_model.post_layernorm"]
    linear = {}
    for layer in range(layers):
        prefix = f"vision_model.encoder.layers.{layer}."
        norms += [f"{prefix}layer_norm1", f"{prefix}layer_norm2"]
        linear |= {f"{prefix}self_attn.{name}_proj": (768, 768) for name in ("q", "k", "v", "out")}
        linear |= {f"{prefix}mlp.fc1": (3072, 768), f"{prefix}mlp.fc2": (768, 3072)}
    for name in norms:
        shapes |= {f"{name}.weight": (768,), f"{name}.bias": (768,)}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def vit_config(layers: int = 12) -> dict[str, object]:
    return {
        "architectures": ["CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-05,
        "projection_dim": 512,
        "dtype": "float32",
    }


def vit_stream(data: Path, arrivals: int = 5, layers: int = 12) -> tuple[Path, list[Path]]:
    """A stream of CLIP vision towers that transformers loads."""
    return write_stream(data / f"clip-vision-{layers}x{arrivals}", vit_shapes(layers), arrivals, vit_config(layers))
