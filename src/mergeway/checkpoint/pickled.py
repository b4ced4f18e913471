"""Pickled checkpoints: refused by default with the command that converts them, read with `weights_only=True` on request."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from torch import Tensor

from mergeway.checkpoint.source import InMemory, read_json
from mergeway.core.files import reading
from mergeway.errors import CheckpointError

SUFFIXES = (".bin", ".pt", ".pth")


def pickles_in(path: Path) -> list[Path]:
    """The pickled weight files that a path stands for, in a directory only when it has no safetensors file."""
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    if any(path.glob("*.safetensors")) or (path / "adapter_config.json").exists():
        return []
    index = path / "pytorch_model.bin.index.json"
    if index.exists():
        weight_map = read_json(index, "the shard index").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: the shard index has no weight_map")
        names = sorted({str(s) for s in weight_map.values()})
        if any(Path(n).name != n for n in names):
            raise CheckpointError(f"{index}: a shard lies outside the model directory; the index cannot be trusted")
        return [path / n for n in names]
    return sorted(
        p for p in path.glob("*") if p.name in {f"{stem}{s}" for stem in ("pytorch_model", "model") for s in SUFFIXES}
    )


def refuse(source: str, path: Path, files: list[Path]) -> CheckpointError:
    """The error that names the two remedies."""
    target = files[0].with_name("model.safetensors")
    command = shlex.join(["python", "-m", "mergeway.checkpoint.convert", str(path), str(target)])
    return CheckpointError(
        f"{source}: {files[0].name} is a pickle, which can run code when read; pass --allow-pickle, or convert it with: {command}"
    )


def read_pickles(source: str, files: list[Path], directory: Path | None) -> InMemory:
    """The tensors of pickled files."""
    checkpoint = InMemory(load_pickles(files), source)
    checkpoint.directory = directory
    return checkpoint


def load_pickles(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of several pickled files."""
    return {name: tensor for path in files for name, tensor in _tensors(path).items()}


def load_weights_only(path: Path) -> object:
    """What a pickled file holds; torch's weights-only reader runs no code from it."""
    try:
        with reading(path):
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as problem:  # torch reports a bad or unsafe pickle in many ways
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        raise CheckpointError(f"{path}: refused by torch's weights-only reader ({reason[0][:160]})") from None


def _tensors(path: Path) -> dict[str, Tensor]:
    loaded = load_weights_only(path)
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise CheckpointError(f"{path}: does not hold a dictionary of tensors")
    return loaded
