"""The base of a trunk: what the trunk keeps of it, and where it is found after one of them has moved.

    base/        config, tokenizer and card of the base, so that an export needs nothing else; if embedded, its weights too
    base.json    where the base is now, if `relocate` was told

A base is known by its digest. Where it lies is a hint, so `base.json` is no part of the history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from mergeway.checkpoint import Checkpoint, Inspection, ModelWriter, open_checkpoint
from mergeway.checkpoint.directory import side_files
from mergeway.checkpoint.source import JsonObject
from mergeway.core.files import contents, copy_file, make_directory, reading, replace_text
from mergeway.core.progress import SILENT, Progress
from mergeway.core.tensors import TensorInfo
from mergeway.errors import BaseNotFound, CheckpointError, TrunkError
from mergeway.fold.prepare import Base, prepare_base
from mergeway.trunk.record import Places
from mergeway.trunk.stamps import Stamps, known_digests, renew_stamps

KEPT = "base"
MOVED = "base.json"


def settings_of_base(base: Checkpoint, places: Places, digest: str, pickles: bool, embed: bool) -> JsonObject:
    """What `trunk.json` says of the base."""
    return {
        "source": places.absolute or places.source,
        "relative": places.relative,
        "digest": digest,
        "allow_pickle": pickles,
        "embedded": embed,
        "files": {path.name: _sha256(path) for path in _kept(base)},
    }


def keep_base(stage: Path, base: Checkpoint, embed: bool, progress: Progress = SILENT) -> None:
    """Write what a new trunk keeps of its base."""
    files = _kept(base)
    if not files and not embed:
        return
    make_directory(stage / KEPT)
    for path in files:
        copy_file(path, stage / KEPT / path.name)
    if embed:
        progress.begin("keeping the base", sum(i.nbytes for i in base.infos.values()), "bytes")
        writer = ModelWriter(stage / KEPT, base.infos, digests=False)
        for name, info in base.infos.items():
            writer.write(name, 0, base.read(name))
            progress.advance(info.nbytes)
        writer.finish()


def _kept(base: Checkpoint) -> list[Path]:
    card = base.directory / "README.md" if base.directory else None
    return [*side_files(base.directory), *([card] if card is not None and card.is_file() else [])]


def _sha256(path: Path) -> str:
    with reading(path):
        return hashlib.sha256(contents(path)).hexdigest()


@dataclass(frozen=True)
class Outline:
    """The base as an export needs it: its name, and its config and tokenizer, which the trunk keeps; no weights."""

    source: str
    directory: Path | None
    infos: Mapping[str, TensorInfo]


class KeptBase:
    """The base of one trunk, found by its digest."""

    def __init__(self, trunk: Path, settings: JsonObject, given: str | None = None) -> None:
        self._trunk, self._given = trunk, given
        self.digest: str = settings["digest"]
        self._at_init = Places(settings["source"], relative=settings.get("relative"))
        self._pickles: bool = settings.get("allow_pickle", False)
        self._files: Mapping[str, str] | None = settings.get("files")
        self.embedded: bool = settings.get("embedded", False)
        self._digested: tuple[Stamps, Inspection] | None = None  # what was found without the help of stamps

    @property
    def source(self) -> str:
        """Where the base was when it was last named."""
        return (self._moved() or self._at_init).source

    def named_places(self) -> list[str]:
        """Every place that the trunk knows its base by."""
        moved = self._moved()
        return [*(moved.seen_from(self._trunk) if moved else []), *self._at_init.seen_from(self._trunk)]

    def find(self, pool: Executor, progress: Progress = SILENT, heads: str | None = None, stamps: bool = True) -> Base:
        """The base, inspected: the first of all places to look at that has its digest.

        With `stamps`, files that the trunk has seen before are believed to be what they were.
        """
        seen: dict[str, str] = {}
        for place in dict.fromkeys(self._places()):
            try:
                checkpoint = open_checkpoint(place, allow_pickle=self._pickles)
                opened = Stamps.of(checkpoint)
                known = known_digests(self._trunk, opened, checkpoint, self.digest) if stamps else None
                found = prepare_base(Inspection(checkpoint, known), pool, progress, heads)
            except CheckpointError as problem:
                seen[place] = str(problem)
                continue
            if found.seen.digest == self.digest:
                self._digested = (opened, found.seen) if known is None else None
                return found
            seen[place] = f"has changed since 'init' (digest {found.seen.digest[:12]}, was {self.digest[:12]})"
        raise self._not_found(seen)

    def remember(self) -> None:
        """Bring up the stamps of a base that had to be digested; for a writer who has just committed something."""
        if self._digested is not None:
            renew_stamps(self._trunk, *self._digested)

    def _not_found(self, seen: Mapping[str, str]) -> TrunkError:
        first = self._given or self.source
        what = seen.get(first, "")
        if what.startswith("has changed"):
            hint = "name the right one" if self._given else "put the old one back, or name it with --base"
            return TrunkError(f"the base {first} {what}; {hint}")
        hint = "" if self._given else "; name it with --base REF, or for good with 'mergeway relocate'"
        return BaseNotFound(f"the base of {self._trunk} cannot be opened: {what}{hint}")

    def _places(self) -> Iterator[str]:
        if self._given is not None:
            yield self._given
            return
        if self.embedded:
            yield str(self._trunk / KEPT)
        yield from self.named_places()
        yield from _beside(self._trunk, Path(self._at_init.source).name)

    def outline(self, model: Checkpoint) -> Outline | None:
        """The base without its weights; None for a trunk that was made before trunks kept so much of it."""
        if self._files is None:
            return None
        kept = self._trunk / KEPT
        return Outline(self.source, kept if kept.is_dir() else None, model.infos)

    def relocate(self, ref: str, pool: Executor, progress: Progress = SILENT) -> str:
        """Write down where the base is now, if it is the base."""
        KeptBase(self._trunk, {**self._settings(), "embedded": False}, ref).find(pool, progress, stamps=False)
        places = Places.of(ref, self._trunk)
        source = places.absolute or places.source
        row = {"source": source, "relative": places.relative}
        replace_text(self._trunk / MOVED, json.dumps(row, indent=2) + "\n")
        return source

    def _settings(self) -> JsonObject:
        return {"digest": self.digest, "source": self._at_init.source, "allow_pickle": self._pickles}

    def problems(self) -> list[str]:
        """Every file that the trunk keeps of its base and that is not as it was, one line each."""
        found: list[str] = []
        if (self._trunk / MOVED).exists() and self._moved() is None:
            found.append(f"{self._trunk / MOVED}: cannot be read; say where the base is with 'mergeway relocate'")
        for name, digest in (self._files or {}).items():
            path = self._trunk / KEPT / name
            if not path.is_file():
                found.append(f"{path}: is missing")
            elif _sha256(path) != digest:
                found.append(f"{path}: was changed after 'init'")
        return found

    def embedded_problem(self, pool: Executor, progress: Progress = SILENT) -> str | None:
        """What is wrong with the weights that the trunk keeps of its base."""
        if not self.embedded:
            return None
        try:
            KeptBase(self._trunk, self._settings(), str(self._trunk / KEPT)).find(pool, progress, stamps=False)
        except TrunkError as problem:
            return str(problem)
        return None

    def _moved(self) -> Places | None:
        try:
            row = json.loads(contents(self._trunk / MOVED))
            return Places(str(row["source"]), relative=row["relative"] and str(row["relative"]))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):  # not there, or damaged: there are other places to look at
            return None


def _beside(trunk: Path, known_as: str) -> list[str]:
    """Models in the directory that holds the trunk, first that with the base's name."""
    parent = trunk.absolute().parent
    try:
        found = [p for p in sorted(parent.iterdir()) if p != trunk.absolute() and _is_model(p)]
    except OSError:
        return []
    return [str(p) for p in sorted(found, key=lambda p: p.name != known_as)]


def _is_model(path: Path) -> bool:
    if path.suffix == ".safetensors":
        return path.is_file()
    return path.is_dir() and not (path / "adapter_config.json").exists() and any(path.glob("*.safetensors"))
