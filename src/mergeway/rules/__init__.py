"""The merging rules by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergeway.core.tensors import compiled
from mergeway.errors import OptionError, suggest
from mergeway.rules.average import Average as Average
from mergeway.rules.dop import Dop as Dop
from mergeway.rules.fisher import Fisher as Fisher
from mergeway.rules.fold import Fold as Fold
from mergeway.rules.iso import Iso as Iso
from mergeway.rules.magmax import Magmax as Magmax
from mergeway.rules.ode.rule import Ode as Ode
from mergeway.rules.opcm import Opcm as Opcm
from mergeway.rules.randmix import Randmix as Randmix
from mergeway.rules.regmean import Regmean as Regmean
from mergeway.rules.rule import Rule as Rule
from mergeway.rules.steer import Steer as Steer
from mergeway.rules.task_arithmetic import TaskArithmetic as TaskArithmetic
from mergeway.rules.ties import Ties as Ties

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (Average, TaskArithmetic, Ties, Opcm, Magmax, Randmix, Iso, Dop, Fisher, Regmean, Ode, Steer)
}


def make(rule: str | Rule, options: Mapping[str, Any] | None = None) -> Rule:
    """The rule of that name with these options; a ready-made rule passes through."""
    if isinstance(rule, Rule):
        if options:
            raise OptionError(f"options {', '.join(options)} given beside a rule that already has its own")
    elif rule not in RULES:
        raise OptionError(f"there is no rule '{rule}'; {suggest(rule, RULES)}")
    made = rule if isinstance(rule, Rule) else RULES[rule].from_options(options or {})
    if (pattern := getattr(made, "linear", None)) is not None:
        compiled(pattern)  # a bad one is said now, not at the first fold
    return made
