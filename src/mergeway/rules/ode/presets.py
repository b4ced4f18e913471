"""The options that go together under one name."""

from __future__ import annotations

from collections.abc import Mapping

from mergeway.rules.rule import Rule

_SHARED: dict[str, object] = {"step": 0.01, "guidance": 0.24, "task_norm": 0.25, "refine": 80}

# `released`: as the released code of ODE-M has them, to the letter. `exact`: the same mechanisms, with an exact QP, gradients of all
# samples, and a plain refinement.
PRESETS: dict[str, dict[str, object]] = {
    "paper": {},
    "exact": _SHARED | {"barrier": "per-task"},
    "released": _SHARED | {"barrier": "released", "refine_by": "released"},
}


def left_alone(rule: Rule, preset: Mapping[str, object]) -> dict[str, object]:
    """The preset's value for every option of the rule that is at its default."""
    return {k: v for k, v in preset.items() if getattr(rule, k) == getattr(type(rule), k)}
