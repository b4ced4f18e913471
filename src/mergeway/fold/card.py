"""The model card of a merged model: what it was made from, how, and by which command."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mergeway import __version__
from mergeway.checkpoint.directory import licence_of
from mergeway.checkpoint.heads import Head, classes_of
from mergeway.checkpoint.resolve import hub_id
from mergeway.core.printed import printable
from mergeway.rules import Description, Rule

# Task, source, digest and weight of an arrival.
Row = tuple[str, str, str, float]


class Origin(Protocol):
    """What a card says of the base: its name and its licence."""

    @property
    def source(self) -> str: ...

    @property
    def directory(self) -> Path | None: ...


def model_card(
    base: Origin,
    base_digest: str,
    arrivals: Sequence[Row],
    rule: Rule | Description,
    command: str | None = None,
    library: str = "transformers",
    notes: str = "",
) -> str:
    """A Hugging Face model card that names every ingredient by digest."""
    options = ", ".join(f"`{key}={json.dumps(value)}`" for key, value in sorted(rule.options().items())) or "none"
    rows = "\n".join(
        f"| {k} | {_cell(task)} | {_code(source)} | {weight:g} | {_code(digest)} |"
        for k, (task, source, digest, weight) in enumerate(arrivals, 1)
    )
    made = f"\n```\n{printable(command)}\n```\n" if command else ""
    return f"""---
{_front_matter(base, library)}
---
# Merged model

Made by mergeway {__version__} with the rule **{rule.name}** ({rule.title}; {rule.paper}), options: {options}.
{made}
Base: {_code(base.source)}, digest `{base_digest}`.
{notes}
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


def adapter_notes(kept: float, rank: int, task: str | None, head: Head | None) -> str:
    """What a reader of an adapter's card has to know: what it loses, and how a task's head is loaded."""
    notes = f"\nBase and adapter of rank {rank} together keep {100 * kept:.2f} % of the squared length of the update.\n"
    if head is None:
        return notes
    count = classes_of(head.tensors)
    return f"""{notes}
The adapter holds the head of the task {_code(str(task))} among its `modules_to_save`. Load the base with as many labels, then the adapter:
`from_pretrained(BASE, num_labels={count}, ignore_mismatched_sizes=True)`.
"""


def _front_matter(base: Origin, library: str) -> str:
    """What the hub reads; a base on somebody's disk has no name there."""
    lines = [f"library_name: {library}", "tags: [mergeway, merge, continual-model-merging]"]
    if found := hub_id(base.source):
        relation = "adapter" if library == "peft" else "merge"
        lines += [f"base_model: {json.dumps(found.repo)}", f"base_model_relation: {relation}"]
    if licence := licence_of(base.directory):
        lines.append(f"license: {json.dumps(licence)}")
    return "\n".join(lines)
