"""Continual model merging: fold a stream of fine-tuned checkpoints into one deployed model.

Names are loaded when first used, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mergeway import metrics as metrics
    from mergeway import rules as rules
    from mergeway.calibration import Samples as Samples
    from mergeway.compute import Compute as Compute
    from mergeway.errors import MergewayError as MergewayError
    from mergeway.merging import merge as merge
    from mergeway.merging import merge_into as merge_into
    from mergeway.objective import Objective as Objective
    from mergeway.ode import Trajectory as Trajectory
    from mergeway.ode import trajectory as trajectory
    from mergeway.suite import load_suite as load_suite
    from mergeway.trunk import Trunk as Trunk

_HOMES = {
    "Compute": "mergeway.compute",
    "MergewayError": "mergeway.errors",
    "Objective": "mergeway.objective",
    "Samples": "mergeway.calibration",
    "Trajectory": "mergeway.ode",
    "Trunk": "mergeway.trunk",
    "load_suite": "mergeway.suite",
    "merge": "mergeway.merging",
    "merge_into": "mergeway.merging",
    "metrics": "mergeway.metrics",
    "rules": "mergeway.rules",
    "trajectory": "mergeway.ode",
}
__all__ = [
    "Compute",
    "MergewayError",
    "Objective",
    "Samples",
    "Trajectory",
    "Trunk",
    "__version__",
    "load_suite",
    "merge",
    "merge_into",
    "metrics",
    "rules",
    "trajectory",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mergeway' has no attribute '{name}'")
    module = importlib.import_module(_HOMES[name])
    value = module if _HOMES[name] == f"mergeway.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
