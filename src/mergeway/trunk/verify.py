"""Finding any changed byte of a trunk, and saying where it is."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Executor
from pathlib import Path

from mergeway.checkpoint.inspect import sha256_of
from mergeway.checkpoint.source import SafetensorsFiles
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import MergewayError
from mergeway.trunk.journal import Journal, Record
from mergeway.trunk.store import DIGESTS, Store

MAX_HEADER = 100_000_000  # as the safetensors library has it


def problems_of(store: Store, pool: Executor, progress: Progress = SILENT) -> list[str]:
    """What is wrong with a trunk's own files, one line each; nothing when all is well."""
    try:
        journal = store.journal()
        settings = store.settings_digest()
    except (MergewayError, OSError) as problem:
        return [str(problem)]
    problems = []
    if journal.records[0].details.get("settings") != settings:
        problems.append(f"{store.settings_path}: was changed after 'init'")
    if not store.steps.is_dir():
        return [*problems, f"{store.steps}: is missing"]
    recorded = {record.step: record for record in journal.records}
    for directory in sorted(p for p in store.steps.iterdir() if p.name.isdigit() and int(p.name) in recorded):
        try:
            found = _snapshot_problems(directory, recorded[int(directory.name)], pool, progress)
        except (MergewayError, OSError) as problem:
            found = [str(problem)]
        # A writer may drop an old snapshot while we read it.
        problems += found if directory.exists() else []
    return problems + _missing(store, journal)


def _missing(store: Store, journal: Journal) -> list[str]:
    last = journal.last
    if last.files is not None and not store.has_snapshot(last.step) and store.journal().last == last:
        return [f"{store.snapshot(last.step)}: the snapshot of the last step is missing"]
    return []


def _snapshot_problems(directory: Path, record: Record, pool: Executor, progress: Progress) -> list[str]:
    listing = directory / DIGESTS
    try:
        text = listing.read_bytes()
    except OSError:
        return [f"{listing}: is missing"]
    if hashlib.sha256(text).hexdigest() != record.files:
        return [f"{listing}: was changed after step {record.step} was committed"]
    digests = json.loads(text)
    problems = [
        f"{directory / name}: does not belong to the snapshot" for name in sorted(_present(directory) - set(digests))
    ]
    for name, expected in digests.items():
        problems += _file_problems(directory / name, expected, pool, progress)
    return problems


def _present(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()} - {DIGESTS}


def _file_problems(path: Path, expected: dict[str, str], pool: Executor, progress: Progress) -> list[str]:
    if not path.exists():
        return [f"{path}: is missing"]
    progress.begin(f"verifying {path.name}", path.stat().st_size, "bytes")
    if path.suffix != ".safetensors":
        return [] if hashlib.sha256(path.read_bytes()).hexdigest() == expected[""] else [f"{path}: was changed"]
    with open(path, "rb") as file:
        length = file.read(8)
        head = length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER))
        if hashlib.sha256(head).hexdigest() != expected[""]:
            return [f"{path}: the header (the first {len(head)} bytes) was changed"]
    try:
        stored = SafetensorsFiles(str(path), [path])
    except MergewayError as problem:
        return [str(problem)]

    def differs(name: str) -> bool:
        progress.advance(stored.infos[name].nbytes)
        return sha256_of(stored.read(name)) != expected[name]

    names = [n for n in expected if n]
    return [f"{path}: tensor '{n}' was changed" for n, bad in zip(names, pool.map(differs, names), strict=True) if bad]
