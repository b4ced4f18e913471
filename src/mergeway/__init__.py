"""Continual model merging: fold a stream of fine-tuned checkpoints into one deployed model.

Names are loaded when first used, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mergeway import rules as rules
    from mergeway.bench import metrics as metrics
    from mergeway.bench.suite import load_suite as load_suite
    from mergeway.calibration.memory import Bounds as Bounds
    from mergeway.calibration.sample_objective import SampleObjective as Objective
    from mergeway.calibration.samples import Samples as Samples
    from mergeway.errors import GateRefused as GateRefused
    from mergeway.errors import MergewayError as MergewayError
    from mergeway.fold.evaluate import evaluate as evaluate
    from mergeway.fold.merge import merge as merge
    from mergeway.fold.merge import merge_into as merge_into
    from mergeway.model.compute import Compute as Compute
    from mergeway.rules.ode import Trajectory as Trajectory
    from mergeway.rules.ode import trajectory as trajectory
    from mergeway.train import integrations as integrations
    from mergeway.trunk import Trunk as Trunk

_HOMES = {
    "Bounds": "mergeway.calibration.memory",
    "GateRefused": "mergeway.errors",
    "evaluate": "mergeway.fold.evaluate",
    "Compute": "mergeway.model.compute",
    "MergewayError": "mergeway.errors",
    "Objective": "mergeway.calibration.sample_objective:SampleObjective",
    "Samples": "mergeway.calibration.samples",
    "Trajectory": "mergeway.rules.ode",
    "Trunk": "mergeway.trunk",
    "integrations": "mergeway.train.integrations",
    "load_suite": "mergeway.bench.suite",
    "merge": "mergeway.fold.merge",
    "merge_into": "mergeway.fold.merge",
    "metrics": "mergeway.bench.metrics",
    "rules": "mergeway.rules",
    "trajectory": "mergeway.rules.ode",
}
__all__ = [
    "Bounds",
    "Compute",
    "GateRefused",
    "MergewayError",
    "Objective",
    "Samples",
    "Trajectory",
    "Trunk",
    "__version__",
    "evaluate",
    "integrations",
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
    home, _, known_as = _HOMES[name].partition(":")
    module = importlib.import_module(home)
    value = module if name in ("integrations", "metrics", "rules") else getattr(module, known_as or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
