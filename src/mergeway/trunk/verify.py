"""Finding any changed byte of a trunk, and saying where it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Executor

from mergeway.core.progress import SILENT, Progress
from mergeway.errors import BaseNotFound, MergewayError, OptionError
from mergeway.trunk.base import KeptBase
from mergeway.trunk.journal import Journal
from mergeway.trunk.store import Store
from mergeway.trunk.tags import FILE, read_tags


def problems_of(store: Store, pool: Executor, progress: Progress = SILENT, against: str | None = None) -> list[str]:
    """What is wrong with a trunk's own files, one line each; nothing when all is well.

    `against` is the digest of a record that was kept elsewhere: a history without that record is another one.
    """
    if against is not None and not re.fullmatch(r"[0-9a-f]{64}", against):
        raise OptionError(
            f"the digest to verify against is '{against}'; it takes the 64 hexadecimal digits that 'add' prints as 'head'"
        )
    try:
        journal = store.journal(settings=False, progress=progress)
        settings = store.settings_digest()
    except (MergewayError, OSError) as problem:
        return [str(problem)]
    problems: list[str] = []
    if against is not None and all(record.hash != against for record in journal.records):
        problems.append(
            f"{store.journal_path}: no record has the digest {against}; this is another history, or it was cut off before that record"
        )
    if journal.records[0].details.get("settings") != settings:
        problems.append(f"{store.settings_path}: was changed after 'init'")
    if not store.steps.is_dir():
        return [*problems, f"{store.steps}: is missing"]
    recorded = {record.step: record for record in journal.records}
    for directory in sorted(p for p in store.steps.iterdir() if p.name.isdigit() and int(p.name) in recorded):
        try:
            found = store.of(recorded[int(directory.name)]).problems(pool.map, progress)
        except (MergewayError, OSError) as problem:
            found = [str(problem)]
        # A writer may drop an old snapshot while we read it.
        problems += found if directory.exists() else []
    return problems + _missing(store, journal) + _tags(store, journal)


def base_problems(
    base: KeptBase, store: Store, others: Sequence[str], pool: Executor, progress: Progress = SILENT
) -> list[str]:
    """What is wrong with the base, and with what the trunk keeps of it; one that is not here is told of if all else is well."""
    problems = base.problems()
    if damaged := base.embedded_problem(pool, progress):
        problems.append(damaged)
    try:
        base.find(pool, progress, stamps=False)
    except BaseNotFound as problem:
        if others or problems:
            return problems
        if store.journal(settings=False).last.files is None:
            return [str(problem)]
        progress.note(f"the base was not compared: {problem}")
    except MergewayError as problem:
        problems.append(str(problem))
    return problems


def _missing(store: Store, journal: Journal) -> list[str]:
    last = journal.last
    if last.files is not None and not store.has_snapshot(last.step) and store.journal(settings=False).last == last:
        return [f"{store.snapshot(last.step)}: the snapshot of the last step is missing"]
    return []


def _tags(store: Store, journal: Journal) -> list[str]:
    try:
        tags = read_tags(store.path)
    except (MergewayError, OSError) as problem:
        return [str(problem)]
    lost = {name: step for name, step in tags.items() if not 0 <= step < len(journal.records)}
    return [f"{store.path / FILE}: tag '{name}' is of step {step}, which there is not" for name, step in lost.items()]
