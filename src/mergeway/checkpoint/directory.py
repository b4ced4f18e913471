"""A model directory on disk: it appears complete or not at all, with the base's side files and a model card."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from mergeway.checkpoint.source import INDEX
from mergeway.checkpoint.writer import write_text, writing
from mergeway.core.ranks import team
from mergeway.errors import CheckpointError

# Config, tokenizer, processor and generation files; weights and cards are written anew, never copied.
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_NOT_COPIED = {
    INDEX,
    "pytorch_model.bin.index.json",
    "adapter_config.json",
    "trainer_state.json",
    "training_args.json",
    "suite.json",
}


@contextlib.contextmanager
def staged_directory(out: Path, force: bool = False) -> Iterator[Path]:
    """A new directory beside `out` that takes its place when the block ends well, and vanishes when it does not."""
    stage = team().from_lead(lambda: _make_stage(out, force))
    try:
        yield stage
        team().from_lead(lambda: _put_in_place(stage, out, force))
    finally:
        if team().lead:
            shutil.rmtree(stage, ignore_errors=True)


def _make_stage(out: Path, force: bool) -> Path:
    check_free(out, force)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = out.parent / f".{out.name}.partial-{os.getpid()}"
        stage.mkdir()
    return stage


def _put_in_place(stage: Path, out: Path, force: bool) -> None:
    with writing(out):
        sync_directory(stage)
        if force and out.exists():
            old = out.parent / f".{out.name}.replaced-{os.getpid()}"
            out.rename(old)
            stage.rename(out)
            shutil.rmtree(old)
        else:
            stage.rename(out)
        sync_directory(out.parent)


def check_free(out: Path, force: bool = False) -> None:
    """Refuse to write over something, so that new files never mix with old ones."""
    _sweep(out)
    with writing(out):
        blocked = out.is_symlink() or (out.exists() and not out.is_dir())
    if blocked:
        raise CheckpointError(f"{out}: exists and is not a directory; choose another")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise CheckpointError(
                f"{out}: exists already and is not empty; choose another, or pass --force to replace it"
            )
        if not any(out.glob("*.safetensors")):
            raise CheckpointError(f"{out}: does not look like a model directory, so --force will not replace it")


def check_apart(out: Path, sources: Iterable[str]) -> None:
    """Refuse to replace a directory that the model is made from."""
    for source in sources:
        if out.exists() and Path(source).exists() and Path(source).resolve().is_relative_to(out.resolve()):
            raise CheckpointError(f"{out}: holds {source}, which the model is made from; choose another directory")


def _sweep(out: Path) -> None:
    """Put right what a killed process left beside `out`: an old output that was set aside comes back, the rest goes."""
    found = re.compile(rf"\.{re.escape(out.name)}\.(partial|replaced)-(\d+)")
    for left in list(out.parent.iterdir()) if out.parent.is_dir() else []:
        match = found.fullmatch(left.name)
        if not match or _alive(int(match[2])):
            continue
        if match[1] == "replaced" and not out.exists():
            with writing(out):
                left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():  # in a container, a process that was killed may have had our number
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def copy_side_files(source: Path | None, target: Path) -> None:
    """Config, tokenizer, processor and generation files beside the weights."""
    if source is None or not source.is_dir() or not team().lead:
        return
    for pattern in _SIDE_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name not in _NOT_COPIED:
                with writing(target / path.name):
                    shutil.copyfile(path, target / path.name)


def write_card(directory: Path, text: str) -> None:
    """The model card beside the weights."""
    if team().lead:
        write_text(directory / "README.md", text)


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries, so that a rename survives a power cut."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
