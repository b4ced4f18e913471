"""The names of a model's tensors: in its checkpoint and in its module. `transformers` stores some models under older names."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from mergeway.checkpoint.source import read_config
from mergeway.errors import OptionError


class Names:
    """From names in a checkpoint to those in the module, and back; most models have the same in both."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def inside(self, stored: str) -> str:
        """What the module calls a tensor of the checkpoint."""
        return stored if stored in self._own else self._renamed.get(stored, stored)

    def stored(self, inside: str) -> str:
        """What the checkpoint calls a tensor of the module."""
        return self._back.get(inside, inside)

    @cached_property
    def _renamed(self) -> dict[str, str]:
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:  # before version 5 the names were the same
            return {}
        if not hasattr(self._model, "config"):
            return {}
        # What would be written to a checkpoint, with numbers in place of the tensors to tell them apart by.
        own = sorted(self._own)
        marks = {name: torch.tensor([float(k)]) for k, name in enumerate(own)}
        try:
            written = revert_weight_conversion(self._model, marks)  # pyright: ignore[reportArgumentType]
        except Exception as problem:  # whatever its conversions make of one number
            raise OptionError(
                f"{type(self._model).__name__}: transformers joins or splits tensors between checkpoint and module, so that no gradient can be taken by name ({type(problem).__name__})"
            ) from None
        return {stored: own[int(mark)] for stored, mark in written.items() if mark.shape == (1,)}

    @cached_property
    def _back(self) -> dict[str, str]:
        return {inside: stored for stored, inside in self._renamed.items()}


def names_of(directory: Path | None) -> Names | None:
    """The names of the model that a directory's config.json describes; None where `transformers` does not know it."""
    model = outline(directory) if directory else None
    return Names(model) if model is not None else None


def outline(directory: Path) -> nn.Module | None:
    """The module that a directory's config.json describes, without values; None where `transformers` makes none of it."""
    config = directory / "config.json"
    if not config.exists():
        return None
    try:
        import transformers

        described = read_config(directory)
        kind = getattr(transformers, described["architectures"][0])
        with torch.device("meta"):
            return kind(kind.config_class.from_dict(described))
    except Exception:  # every class checks its config by itself
        return None
