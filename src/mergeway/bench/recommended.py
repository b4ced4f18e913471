"""How the models of a suite are trained and aligned: the paper's numbers, unless its `suite.json` recommends others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar

from mergeway.bench.suite import Suite
from mergeway.calibration.alignment import Alignment
from mergeway.errors import OptionError, suggest
from mergeway.train import Training

Kind = TypeVar("Kind", Training, Alignment)

# What a caller decides, and no suite.
_NOT_RECOMMENDED = {"seed", "tangent", "lwf", "ewc"}
# What a caller gives takes the place of these too, since the two go together.
_TOGETHER = {"epochs": "steps", "lora": "lora_alpha"}


def recommended(suite: Suite, key: str, kind: type[Kind], given: Mapping[str, object]) -> Kind:
    """The settings under `key` in suite.json, with what was `given` in their place."""
    found = suite.settings.get(key, {})
    known = {f.name for f in fields(kind)} - _NOT_RECOMMENDED
    if not isinstance(found, dict):
        raise OptionError(f"{suite.path / 'suite.json'}: '{key}' must be an object, such as {{\"lr\": 1e-5}}")
    for name in found:
        if name not in known:
            raise OptionError(f"{suite.path / 'suite.json'}: '{key}' has no entry '{name}'; {suggest(name, known)}")
    dropped = {partner for name, partner in _TOGETHER.items() if name in given}
    return kind(**{**{name: value for name, value in found.items() if name not in dropped}, **given})
