"""`mergeway bench --dry-run`: what a run would take, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergeway.bench.suite import Suite


def forecast(
    suite: Suite,
    rules: Sequence[str],
    lengths: Sequence[int] | None,
    orders: int,
    samples: int,
    out: Path | None,
    as_json: bool,
    paper: bool,
) -> None:
    """Print it; nothing is folded."""
    from mergeway.bench.protocol import check_plan, plan
    from mergeway.bench.rehearsal import PROBE, rehearse
    from mergeway.cli.display import console, print_json
    from mergeway.errors import OptionError

    if paper:
        raise OptionError("--dry-run: tables and figures share streams, which it cannot count; give --rules instead")
    lengths = lengths or [len(suite.tasks)]
    check_plan(suite, lengths, orders, "uniform", 1, "local")
    found = rehearse(suite, plan(suite, rules, lengths, orders, "uniform", samples), out)
    if as_json:
        print_json(found.as_json())
        return
    lines = [
        f"{found.suite}: {found.tasks} tasks, {found.parameters / 1e6:.1f} million weights; base, experts, heads and data are there and fit",
        f"{found.streams} streams, {found.folds} folds: {found.judged} test inputs to judge, about {_time(found.seconds)} "
        f"at {1000 * found.seconds_each:.3g} ms each (the base on {PROBE} of them)",
    ]
    if found.needing_data:
        lines.append(
            f"{', '.join(found.needing_data)}: a gradient over {samples} samples takes about {_time(found.gradient_seconds)}; "
            "the page of a rule says how many it takes"
        )
    lines.append(f"disk: {_size(found.kept)} for a stream under way, {_size(found.free)} are free")
    lines.append("the folding itself is not in these times; nothing was run")
    for line in lines:
        console().print(line, markup=False, soft_wrap=True)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
