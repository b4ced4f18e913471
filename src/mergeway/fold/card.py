"""The model card of a merged model: what it was made from, how, and by which command."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mergeway import __version__
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
        f"| {k} | {task} | `{source}` | {weight:g} | `{digest}` |"
        for k, (task, source, digest, weight) in enumerate(arrivals, 1)
    )
    made = f"\n```\n{command}\n```\n" if command else ""
    return f"""---
base_model: {json.dumps(base)}
library_name: {library}
tags: [mergeway, merge, continual-model-merging]
---
# Merged model

Made by mergeway {__version__} with the rule **{rule.name}** ({rule.title}; {rule.paper}), options: {options}.
{made}
Base: `{base}`, digest `{base_digest}`.

| k | task | arrival | weight | digest |
|---|---|---|---|---|
{rows}

A digest is the SHA-256 over the name, dtype, shape and bytes of every tensor, so it does not depend on how a checkpoint is sharded.
"""
