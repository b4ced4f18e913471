"""A model directory on disk: what it may replace, the base's side files in it, and a model card."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from mergeway.checkpoint.source import INDEX, read_json
from mergeway.core.files import copy_file, write_text, writing
from mergeway.core.ranks import team
from mergeway.core.stages import restore, staged
from mergeway.errors import CheckpointError

# Config, tokenizer, processor and generation files; weights and cards are written anew, never copied.
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_CODE = ("*.py",)  # only where the config names classes in them; whoever loads the model decides whether they run
_NOT_COPIED = {
    INDEX,
    "pytorch_model.bin.index.json",
    "adapter_config.json",
    "trainer_state.json",
    "training_args.json",
    "suite.json",
}


def staged_directory(out: Path, force: bool = False) -> AbstractContextManager[Path]:
    """A stage for a model directory that takes the place of `out`, which must be free, or with `force` an older model."""
    team().from_lead(lambda: check_free(out, force))
    return staged(out, force, team())


def check_free(out: Path, force: bool = False) -> None:
    """Refuse to write over something, so that new files never mix with old ones."""
    restore(out)
    with writing(out):
        blocked = out.is_symlink() or (out.exists() and not out.is_dir())
    if blocked:
        raise CheckpointError(f"{out}: exists and is not a directory; choose another")
    with writing(out):
        taken = out.is_dir() and any(out.iterdir())
    if taken:
        if not force:
            raise CheckpointError(
                f"{out}: exists already and is not empty; choose another, or pass --force to replace it"
            )
        if not any(out.glob("*.safetensors")):
            raise CheckpointError(f"{out}: does not look like a model directory, so --force will not replace it")


def check_apart(out: Path, sources: Iterable[str]) -> None:
    """Refuse to replace a directory that holds a source of the model."""
    for source in sources:
        if out.exists() and Path(source).exists() and Path(source).resolve().is_relative_to(out.resolve()):
            raise CheckpointError(f"{out}: holds {source}, which the model is made from; choose another directory")


def side_files(directory: Path | None) -> list[Path]:
    """Config, tokenizer, processor and generation files beside the weights."""
    if directory is None or not directory.is_dir():
        return []
    patterns = (*_SIDE_FILES, *_CODE) if _names_code(directory) else _SIDE_FILES
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.name not in _NOT_COPIED)


def _names_code(directory: Path) -> bool:
    """Whether the config names classes in files beside it, so that the model cannot be loaded without these."""
    config = directory / "config.json"
    return config.is_file() and "auto_map" in read_json(config, "the model's config")


def copy_side_files(source: Path | None, target: Path) -> None:
    """The side files of a model beside the weights of another."""
    for path in side_files(source) if team().lead else ():
        copy_file(path, target / path.name)


def write_card(directory: Path, text: str) -> None:
    """The model card beside the weights."""
    if team().lead:
        write_text(directory / "README.md", text)


def licence_of(directory: Path | None) -> str | None:
    """The licence that the card of a model names, if there is one."""
    card = directory / "README.md" if directory else None
    if card is None or not card.is_file():
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license: *['\"]?([\w.+-]+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None
