"""The options that go together under one name."""

from __future__ import annotations

from collections.abc import Mapping

from mergeway.rules.rule import Rule

# As the released code of ODE-M sets them.
RELEASED = {"step": 0.01, "guidance": 0.24, "task_norm": 0.25, "barrier": "per-task", "refine": 80}


def left_alone(rule: Rule, preset: Mapping[str, object]) -> dict[str, object]:
    """The preset's value for every option of the rule that is at its default."""
    return {k: v for k, v in preset.items() if getattr(rule, k) == getattr(type(rule), k)}
