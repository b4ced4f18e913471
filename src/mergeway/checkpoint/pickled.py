"""Pickled checkpoints: refused by default, read with `weights_only=True` on request, converted by this module's main.

python -m mergeway.checkpoint.pickled pytorch_model.bin model.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from mergeway.checkpoint.source import InMemory, read_json
from mergeway.errors import CheckpointError, MergewayError

SUFFIXES = (".bin", ".pt", ".pth")


def pickles_in(path: Path) -> list[Path]:
    """The pickled weight files that a path stands for, in a directory only when it has no safetensors file."""
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    if any(path.glob("*.safetensors")) or (path / "adapter_config.json").exists():
        return []
    index = path / "pytorch_model.bin.index.json"
    if index.exists():
        names = sorted({str(s) for s in read_json(index, "the shard index").get("weight_map", {}).values()})
        if any(Path(n).name != n for n in names):
            raise CheckpointError(f"{index}: a shard lies outside the model directory; the index cannot be trusted")
        return [path / n for n in names]
    return sorted(
        p for p in path.glob("*") if p.name in {f"{stem}{s}" for stem in ("pytorch_model", "model") for s in SUFFIXES}
    )


def refuse(source: str, files: list[Path]) -> CheckpointError:
    """The error that names the way out."""
    first = files[0]
    return CheckpointError(
        f"{source}: {first.name} is a pickle, which can run code when read; convert it with "
        f"'python -m mergeway.checkpoint.pickled {first} {first.with_name('model.safetensors')}' or pass --allow-pickle"
    )


def read_pickles(source: str, files: list[Path], directory: Path | None) -> InMemory:
    """The tensors of pickled files; torch's weights-only reader runs no code from them."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors.update(_load(path))
    checkpoint = InMemory(tensors, source)
    checkpoint.directory = directory
    return checkpoint


def _load(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except Exception as problem:  # torch reports a bad or unsafe pickle in many ways
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        raise CheckpointError(f"{path}: refused by torch's weights-only reader ({reason[0][:160]})") from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise CheckpointError(f"{path}: does not hold a dictionary of tensors")
    return loaded


def main(arguments: list[str]) -> int:
    """Convert one pickled file; the exit code."""
    if len(arguments) != 2:
        print("usage: python -m mergeway.checkpoint.pickled IN.bin OUT.safetensors", file=sys.stderr)
        return 2
    from safetensors.torch import save_file

    source, target = map(Path, arguments)
    try:
        if target.exists():
            raise CheckpointError(f"{target}: exists already; choose another name")
        # A pickle may hold views of one storage; a safetensors file holds each tensor by itself.
        save_file({name: t.contiguous().clone() for name, t in _load(source).items()}, target)
    except MergewayError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
