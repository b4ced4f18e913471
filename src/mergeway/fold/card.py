"""The model card of a merged model: what it was made from, how, and by which command."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mergeway import __version__
from mergeway.core.printed import printable
from mergeway.rules import Rule

# Task, source, digest and weight of an arrival.
Row = tuple[str, str, str, float]


def model_card(
    base: str,
    base_digest: str,
    arrivals: Sequence[Row],
    rule: Rule,
    command: str | None = None,
    library: str = "transformers",
) -> str:
    """A Hugging Face model card that names every ingredient by digest."""
    options = ", ".join(f"`{key}={json.dumps(value)}`" for key, value in rule.options().items()) or "none"
    rows = "\n".join(
        f"| {k} | {_cell(task)} | {_code(source)} | {weight:g} | {_code(digest)} |"
        for k, (task, source, digest, weight) in enumerate(arrivals, 1)
    )
    made = f"\n```\n{printable(command)}\n```\n" if command else ""
    return f"""---
base_model: {json.dumps(printable(base), ensure_ascii=False)}
library_name: {library}
tags: [mergeway, merge, continual-model-merging]
---
# Merged model

Made by mergeway {__version__} with the rule **{rule.name}** ({rule.title}; {rule.paper}), options: {options}.
{made}
Base: {_code(base)}, digest `{base_digest}`.

| k | task | arrival | weight | digest |
|---|---|---|---|---|
{rows}

A digest is the SHA-256 over the name, dtype, shape and bytes of every tensor, so it does not depend on how a checkpoint is sharded.
"""


def _cell(text: str) -> str:
    """A name in a table: nothing in it is markup."""
    return re.sub(r"([\\`*_\[\]<>|&#!~])", r"\\\1", printable(text))


def _code(text: str) -> str:
    """A name as code, in more backticks than it holds in a row; a bar would end the cell of a table even there."""
    shown = printable(text).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if "`" in shown else f"`{shown}`"
