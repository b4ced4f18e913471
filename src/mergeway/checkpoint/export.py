"""Writing any checkpoint as a model directory of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from mergeway.checkpoint.directory import copy_side_files, staged_directory, write_card
from mergeway.checkpoint.inspect import is_finite
from mergeway.checkpoint.source import Checkpoint
from mergeway.checkpoint.writer import ModelWriter
from mergeway.core.progress import Progress
from mergeway.core.tensors import BLOCK, TensorInfo
from mergeway.errors import CheckpointError


def write_model(
    out: Path,
    model: Checkpoint,
    side: Path | None,
    card: str,
    dtype: torch.dtype | None,
    shard_size: int,
    force: bool,
    progress: Progress,
    finish: Callable[[Path], None] = lambda _: None,
) -> Path:
    """The model's weights, in another dtype if asked, with the `side` files of the base's directory and a card; `finish` adds the rest."""
    infos = {n: TensorInfo(i.shape, dtype if dtype and i.merges else i.dtype) for n, i in model.infos.items()}
    with staged_directory(out, force) as stage:
        writer = ModelWriter(stage, infos, shard_size)
        progress.begin("exporting", sum(i.nbytes for i in infos.values()), "bytes")
        for name, info in infos.items():
            tensor = model.read(name).reshape(-1)
            for start in range(0, info.numel, BLOCK):
                block = tensor[start : start + BLOCK].to(info.dtype)
                if info.merges and not is_finite(block):
                    raise CheckpointError(
                        f"tensor '{name}' does not fit into {info.dtype}; export with a wider --dtype"
                    )
                writer.write(name, start, block)
            progress.advance(info.nbytes)
        writer.finish()
        copy_side_files(side, stage)
        write_card(stage, card)
        finish(stage)
    return out
