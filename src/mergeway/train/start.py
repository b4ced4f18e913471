"""Where a fine-tuning starts: the base, an arrival, a trunk or tensors, and the tasks that it has learned by then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mergeway.checkpoint import Checkpoint, open_checkpoint
from mergeway.checkpoint.source import read_json
from mergeway.errors import OptionError
from mergeway.train.training import Start
from mergeway.trunk import Trunk

SETTINGS = "training.json"


@dataclass(frozen=True)
class Begun:
    """The start as a checkpoint, its directory if it is an arrival, and the tasks behind it; None where that is not known."""

    checkpoint: Checkpoint
    folder: Path | None
    learned: tuple[str, ...] | None


def open_start(base: Checkpoint, start: Start, learned: Sequence[str] | None) -> Begun:
    """What to start from; `learned` names the tasks behind it, where nothing on disk does."""
    named = tuple(learned) if learned is not None else None
    if start is None:
        return Begun(base, None, named or ())
    if isinstance(start, str | Path) and (Path(start) / "trunk.json").exists():
        trunk = Trunk.open(start)
        return Begun(trunk.deployed(), None, named or tuple(f.task for f in trunk.folded()))
    opened = open_checkpoint(start, base)
    for name, info in base.infos.items():
        if info.merges and (name not in opened.infos or opened.infos[name].shape != info.shape):
            raise OptionError(f"{opened.source}: tensor '{name}' is missing or of another shape; it is another model")
    return Begun(opened, opened.directory, named or _written(opened.directory))


def _written(folder: Path | None) -> tuple[str, ...] | None:
    """The tasks that an arrival of `finetune` says it has learned."""
    if folder is None or not (folder / SETTINGS).exists():
        return None
    learned = read_json(folder / SETTINGS, "how the arrival was trained").get("learned")
    return tuple(map(str, learned)) if isinstance(learned, list) else None
