"""A task of a suite, and the words that a suite.json may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergeway.errors import OptionError

PROTOCOLS = ("task", "cil", "dil")
CLASSIFIERS = ("head", "nearest-mean")


@dataclass(frozen=True)
class SuiteTask:
    """One task: the expert that arrives, the data it is judged on, its frozen head, and which of the head's rows are its own."""

    name: str
    arrives: Path | None
    data: Path
    head: Path
    labels: tuple[int, ...] | None = None

    @property
    def expert(self) -> Path:
        """The task's expert; a suite may leave it to be trained."""
        if self.arrives is None:
            raise OptionError(
                f"task '{self.name}' comes without an expert; train one with 'mergeway finetune', and name it as 'expert' in suite.json"
            )
        return self.arrives

    def is_of(self, ref: str | Path) -> bool:
        """Whether a checkpoint is the task's expert, or a directory named after the task."""
        path = Path(ref)
        return path.name == self.name or (self.arrives is not None and path.resolve() == self.arrives.resolve())
