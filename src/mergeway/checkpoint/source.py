"""A checkpoint: named tensors, known before they are read and read one at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mergeway.checkpoint.mapped import DTYPES, MappedFile, one_line
from mergeway.core.files import regular
from mergeway.core.tensors import TensorInfo
from mergeway.errors import CheckpointError

# A JSON object of a file: anything may be in it.
JsonObject = dict[str, Any]

MAX_JSON = 1 << 28  # bytes; the index of the largest models takes a hundredth of it
_SPELLED = {dtype: text for text, dtype in DTYPES.items()}


def spell_dtype(dtype: torch.dtype) -> str:
    """The name of a dtype in a safetensors header."""
    return _SPELLED[dtype]


@runtime_checkable
class Checkpoint(Protocol):
    """What the rest of the library knows of a checkpoint."""

    @property
    def source(self) -> str:
        """Where it came from, as a person would write it."""
        ...

    @property
    def directory(self) -> Path | None:
        """The directory whose config and tokenizer belong to the weights, if there is one."""
        ...

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, read only; on disk it is mapped, not copied."""
        ...

    def expect(self, name: str) -> None:
        """The tensor will be read soon, so that the disk can work while the tensor before it is folded."""
        ...


class InMemory:
    """A module's or a dictionary's tensors as a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor] | nn.Module, source: str = "memory") -> None:
        if isinstance(tensors, nn.Module):
            tensors = tensors.state_dict()
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"{source}: '{name}' is {type(tensor).__name__}, not a tensor")
            if tensor.dtype not in _SPELLED:
                raise CheckpointError(
                    f"{source}: tensor '{name}' has dtype {tensor.dtype}, which safetensors cannot hold"
                )
        self.source = source
        self.directory: Path | None = None
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name].contiguous().cpu()

    def expect(self, name: str) -> None:
        """It is here."""


class SafetensorsFiles:
    """One or many safetensors files, mapped into memory."""

    def __init__(self, source: str, files: list[Path], directory: Path | None = None) -> None:
        self.source = source
        self.directory = directory
        self.infos: dict[str, TensorInfo] = {}
        self._file_of: dict[str, MappedFile] = {}
        self.files = [MappedFile(file) for file in files]
        for file in self.files:
            for name, info in file.infos.items():
                if name in self._file_of:
                    raise CheckpointError(
                        f"{file.path}: tensor '{name}' is also in {self._file_of[name].path.name}; the checkpoint is not one model"
                    )
                self.infos[name] = info
                self._file_of[name] = file

    def read(self, name: str) -> Tensor:
        return self._file_of[name].read(name)

    def expect(self, name: str) -> None:
        self._file_of[name].expect(name)


def read_json(path: Path, what: str) -> JsonObject:
    """A JSON object from a file, or one line that says why not."""
    try:
        if path.exists():
            regular(path)
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(
                f"{path}: {what} has {path.stat().st_size} bytes, more than any such file; get it again"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{path}: {what} cannot be read ({problem.strerror})") from None
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: {what} is not valid JSON ({one_line(problem)})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what} holds {type(value).__name__}, not an object")
    return value


MOST_LAYERS = 10_000  # of a model that is built one by one from its config, before any weight is looked at
_COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "image_size")


def read_config(directory: Path) -> JsonObject:
    """The config.json of a model directory, with counts such as a model has."""
    path = directory / "config.json"
    config = read_json(path, "the model's config")
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for key, value in (item for part in parts for item in part.items()):
        if not isinstance(value, int | float):
            continue
        if "layers" in key and not value <= MOST_LAYERS:
            raise CheckpointError(f"{path}: '{key}' is {str(value)[:40]}; no model has so many layers")
        if key in _COUNTS and value < 1:
            raise CheckpointError(f"{path}: '{key}' is {str(value)[:40]}; a model has at least 1")
    return config


INDEX = "model.safetensors.index.json"


def open_directory(source: str, directory: Path) -> SafetensorsFiles:
    """The weights of a Hugging Face model directory: its index and shards, or its only safetensors file."""
    index = directory / INDEX
    if index.exists():
        return _open_shards(source, directory, index)
    single = directory / "model.safetensors"
    if single.exists():
        return SafetensorsFiles(source, [single], directory)
    found = sorted(p for p in directory.glob("*.safetensors") if p.name != "moments.safetensors")
    if len(found) == 1:
        return SafetensorsFiles(source, found, directory)
    if found:
        names = ", ".join(p.name for p in found[:5])
        raise CheckpointError(
            f"{directory}: {len(found)} safetensors files ({names}) but no {INDEX} that says which make up the model"
        )
    raise CheckpointError(
        f"{directory}: not a model directory (no model.safetensors, no {INDEX}, no adapter_config.json)"
    )


def _open_shards(source: str, directory: Path, index: Path) -> SafetensorsFiles:
    weight_map = read_json(index, "the shard index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: the shard index has no weight_map")
    shards = sorted({s if isinstance(s, str) else repr(s) for s in weight_map.values()})
    for shard in shards:
        if os.path.isabs(shard) or ".." in Path(shard).parts or "\\" in shard or "\0" in shard:
            raise CheckpointError(
                f"{index}: shard '{shard}' lies outside the model directory; the index cannot be trusted"
            )
    checkpoint = SafetensorsFiles(source, [directory / s for s in shards], directory)
    for what, names in (
        ("is in no shard", weight_map.keys() - checkpoint.infos.keys()),
        ("is not in the index", checkpoint.infos.keys() - weight_map.keys()),
    ):
        if names:
            raise CheckpointError(
                f"{index}: tensor '{min(names)}' {what} ({len(names)} such); the index and the shards do not belong together"
            )
    return checkpoint
