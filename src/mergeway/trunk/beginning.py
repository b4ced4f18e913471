"""How a trunk begins: what is fixed at `init`, checked and written down."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from mergeway.calibration.memory import Bounds
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.heads import head_pattern
from mergeway.core.files import write_text
from mergeway.core.pool import worker_pool
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError, TrunkError
from mergeway.fold.prepare import prepare_base
from mergeway.rules import Description, Rule, make
from mergeway.trunk.base import keep_base, settings_of_base
from mergeway.trunk.record import Places, Record, now
from mergeway.trunk.stamps import SEEN, Stamps, stamp_text
from mergeway.trunk.store import Store


@dataclass(frozen=True)
class Beginning:
    """What is fixed at `init`, besides the base: the rule and the name it is found by again, and what the trunk keeps."""

    rule: Rule
    name: str
    keep: int
    memory: Bounds
    heads: str | None
    embed_base: bool
    allow_pickle: bool

    def create(self, path: Path, base: str | Path, threads: int | None, progress: Progress = SILENT) -> Store:
        """The files of a new trunk."""
        if type(make(self.name, self.rule.options())).__qualname__ != type(self.rule).__qualname__:
            raise OptionError(
                f"rule '{self.name}' cannot be found again by its name; put its class into a module of its own"
            )
        _check_kept(self.keep, base)
        checkpoint = open_checkpoint(base, allow_pickle=self.allow_pickle)
        opened = Stamps.of(checkpoint)
        with worker_pool(threads) as pool:
            seen = prepare_base(checkpoint, pool, progress).seen
        digest = seen.digest
        about = asdict(Description.of(self.rule))
        options = about.pop("chosen")
        place = Places.of(str(base), path)
        kept = settings_of_base(checkpoint, place, digest, self.allow_pickle, self.embed_base)
        settings = {
            "base": kept,
            "rule": self.name,
            "options": options,
            "about": about,
            "keep": self.keep,
            "memory": asdict(self.memory),
            "heads": head_pattern(checkpoint, self.heads),
        }
        details = {"rule": self.name, "options": options, "origin": about["origin"]}
        first = Record(0, "init", digest, now(), source=kept["source"], digest=digest, details=details)

        def fill(stage: Path) -> None:
            keep_base(stage, checkpoint, self.embed_base, progress)
            write_text(stage / SEEN, stamp_text(opened, seen))

        return Store.create(path, settings, first, fill)


def _check_kept(keep: object, base: object) -> None:
    """What a trunk writes down and comes back to must be what `create` asks for, whatever a caller gave."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise OptionError(f"keep is {keep!r}; at least 1 snapshot must be kept")
    if not isinstance(base, str | Path):
        raise TrunkError(f"the base of a trunk is a path or a hub id, not {type(base).__name__}; save the model first")
