"""The history of a trunk as a reader sees it: records, what the models of steps hold, tags, and which steps are kept."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from mergeway.errors import OptionError, TrunkError, suggest
from mergeway.trunk.journal import Folded, Journal, Record, held_newest_first
from mergeway.trunk.newest import newest_first
from mergeway.trunk.record import Places
from mergeway.trunk.store import Store
from mergeway.trunk.tags import read_tags

# A step by its number, or by its tag.
Step = int | str


class History:
    """What the journal of a trunk says."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def path(self) -> Path:
        return self._store.path

    def log(self, newest: int | None = None) -> list[Record]:
        """Every journal record, oldest first; or the `newest` ones, at a cost that does not grow with the journal.

        Of the newest the others are not read: the head vouches for the last, and each record for the one before it.
        """
        if newest is None:
            return self._store.journal().records
        return list(islice(newest_first(self._store.trusted()), newest))[::-1]

    def record(self, step: Step, journal: Journal | None = None) -> Record:
        """The journal record of one step, by its number or its tag."""
        records = (journal or self._store.journal()).records
        return records[self._among(len(records) - 1, step)]

    def tags(self) -> dict[str, int]:
        """The names of steps."""
        return read_tags(self.path)

    def step_of(self, step: Step) -> int:
        """The number of a step that is given by number or by tag."""
        if isinstance(step, int) or step.lstrip("-").isdecimal():
            return int(step)
        tags = self.tags()
        if step not in tags:
            known = suggest(step, tags) if tags else "the trunk has no tags"
            raise OptionError(f"{self.path}: '{step}' is neither the number of a step nor a tag; {known}")
        return tags[step]

    def folded(self, step: Step | None = None, newest: int | None = None) -> list[Folded]:
        """The arrivals that the deployed model holds, or that of a step; all, or the `newest`."""
        if newest is None:
            return self._store.journal().folded(None if step is None else self.record(step).step)
        point = self._store.trusted()
        at = point.last.step if step is None else self._among(point.last.step, step)
        return list(islice(held_newest_first(newest_first(point), at), newest))[::-1]

    def _among(self, last: int, step: Step) -> int:
        """The number of a step that must be there."""
        number = self.step_of(step)
        if not 0 <= number <= last:
            raise TrunkError(f"{self.path}: there is no step {number}; the last is {last}")
        return number

    def sizes(self) -> dict[int, int]:
        """The bytes of every snapshot that is kept; files that steps share count for each of them."""
        return {step: size_of(self._store.snapshot(step)) for step in self._store.present()}

    def places_of(self, step: int) -> list[str]:
        """Where the arrival of a step may lie today: where it was, and where it was as seen from the trunk."""
        return Places.recorded(self.record(step)).seen_from(self.path)

    def place_of(self, step: int) -> str:
        """Where the arrival of a step is today; where it was given from if it is at none of its places on this disk."""
        record = self.record(step)
        return next((place for place in self.places_of(step) if Path(place).exists()), str(record.source))

    def keeps(self, record: Record) -> bool:
        """Whether `rollback` can go back to the step of a record."""
        return record.files is None or self._store.has_snapshot(record.step)

    def kept_steps(self) -> list[int]:
        """The steps that `rollback` can go back to."""
        return [r.step for r in self.log() if self.keeps(r)]


def size_of(directory: Path) -> int:
    """The bytes of the files in a directory."""
    return sum(p.stat().st_size for p in directory.iterdir() if p.is_file())
