"""The baselines as the papers ran them: task arithmetic and TIES with λ by stream length, and with App. D's forms under utilities."""

from __future__ import annotations

from collections.abc import Sequence

from mergeway.bench.paper.study import with_option
from mergeway.bench.protocol import parse_rule

SCALED = ("task-arithmetic", "ties")
SHORT, BEYOND = 8, 0.1  # OPCM's grid search: λ = 0.3, the rules' default, at 8 tasks, and 0.1 at 14 and 20


def as_published(rules: Sequence[str], length: int, utilities: str = "uniform") -> dict[str, str]:
    """Each rule as a table shows it, with the rule that is run at this length; an option that you set yourself stays.

    Under utilities task arithmetic and TIES are those of ODE-M's App. D (Eq. 47-53), `form=mean`.
    """
    chosen = {}
    for rule in rules:
        shown = rule
        if utilities != "uniform" and _left_open(rule, "form"):
            shown = with_option(rule, "form", "mean")
        run = with_option(shown, "scaling", BEYOND) if length > SHORT and _left_open(rule, "scaling") else shown
        chosen[shown] = run
    return chosen


def _left_open(rule: str, option: str) -> bool:
    """Whether a rule is one of the two and says nothing of that option."""
    return parse_rule(rule)[0] in SCALED and not any(p.startswith(f"{option}=") for p in rule.split(":")[1:])


def note_of(rules: Sequence[str], lengths: Sequence[int]) -> str:
    """What a table says where λ depends on its lengths."""
    if max(lengths) <= SHORT or not any(_left_open(rule, "scaling") for rule in rules):
        return ""
    return f"λ of task-arithmetic and ties is 0.3 up to {SHORT} tasks and {BEYOND} beyond, as in OPCM."
