"""A training that can be killed at any moment: its state is replaced whole, and found again by the same command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from mergeway.core.files import make_directory, replaced
from mergeway.errors import OptionError


class Saved(TypedDict):
    """What a training goes on from."""

    step: int
    log: list[dict[str, float]]
    params: dict[str, Tensor]
    optimiser: dict[str, object]


class State:
    """The state of a training beside its output; what it was started with must not change in between."""

    def __init__(self, out: Path, described: dict[str, object]) -> None:
        self._folder = out.parent / f".{out.name}.training"
        self._file = self._folder / "state.pt"
        self._described = described

    def read(self) -> Saved | None:
        """Where the training was when it was killed; None for a new one."""
        if not self._file.exists():
            return None
        try:
            state = torch.load(self._file, map_location="cpu", weights_only=True)
        except Exception as problem:
            raise OptionError(
                f"{self._file}: the state of an interrupted training cannot be read ({type(problem).__name__}); remove {self._folder} to start over"
            ) from None
        if state["described"] != self._described:
            raise OptionError(
                f"{self._folder}: holds an interrupted training with other settings; give the same again, or remove it to start over"
            )
        return state

    def write(self, state: Saved) -> None:
        """Replace the state; a kill at any moment leaves the old or the new."""
        make_directory(self._folder)
        with replaced(self._file) as new, open(new, "wb") as file:
            try:
                torch.save({"described": self._described, **state}, file)
            except RuntimeError as problem:  # torch's word for a disk that refuses
                cause = problem.__context__
                raise (cause if isinstance(cause, OSError) else problem) from None

    def drop(self) -> None:
        """The training is done."""
        shutil.rmtree(self._folder, ignore_errors=True)
