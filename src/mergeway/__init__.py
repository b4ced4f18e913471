"""Continual model merging: fold a stream of fine-tuned checkpoints into one deployed model.

Names are loaded when first used, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mergeway import rules as rules
    from mergeway.errors import MergewayError as MergewayError
    from mergeway.merging import merge as merge
    from mergeway.merging import merge_into as merge_into
    from mergeway.trunk import Trunk as Trunk

_HOMES = {
    "MergewayError": "mergeway.errors",
    "Trunk": "mergeway.trunk",
    "merge": "mergeway.merging",
    "merge_into": "mergeway.merging",
    "rules": "mergeway.rules",
}
__all__ = ["MergewayError", "Trunk", "__version__", "merge", "merge_into", "rules"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mergeway' has no attribute '{name}'")
    module = importlib.import_module(_HOMES[name])
    value = module if _HOMES[name] == f"mergeway.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
