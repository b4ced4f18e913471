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
from mergeway.checkpoint.source import JsonObject, read_json
from mergeway.core.printed import printable
from mergeway.rules import Description, Rule

# Task, source, digest and weight of an arrival.
Row = tuple[str, str, str, float]

# What the hub calls that which a model does, by the end of its class's name.
_WHAT_IT_DOES = {
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}
_METRICS = {"accuracy": "accuracy", "exact": "exact_match", "choices": "accuracy"}


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
    checks: Sequence[JsonObject] = (),
) -> str:
    """A Hugging Face model card that names every ingredient by digest; `checks` are what the gate found of this model."""
    options = ", ".join(f"`{key}={json.dumps(value)}`" for key, value in sorted(rule.options().items())) or "none"
    rows = "\n".join(
        f"| {k} | {_cell(task)} | {_code(_place(source))} | {weight:g} | {_code(digest)} |"
        for k, (task, source, digest, weight) in enumerate(arrivals, 1)
    )
    block = f"\n```\n{printable(command)}\n```\n" if command else ""
    return f"""---
{_front_matter(base, library, checks)}
---
# Merged model

Made by mergeway {__version__} with the rule **{rule.name}** ({rule.title}; {rule.paper}), options: {options}.
{block}
Base: {_code(_place(base.source))}, digest `{base_digest}`.
{notes}
| k | task | arrival | weight | digest |
|---|---|---|---|---|
{rows}
{_found(checks)}
A digest is the SHA-256 over the name, dtype, shape and bytes of every tensor, so it does not depend on how a checkpoint is sharded.
"""


def _place(source: str) -> str:
    """Where something is from, without the directories of somebody's disk; a checkpoint's own name says too little."""
    path = Path(source)
    if not path.is_absolute():
        return source
    return f"{path.parent.name}/{path.name}" if re.fullmatch(r"checkpoint-\d+", path.name) else path.name


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


def _found(checks: Sequence[JsonObject]) -> str:
    """What the model is worth on held-out data, as a table."""
    if not checks:
        return ""
    rows = "".join(
        f"| {_cell(str(row['task']))} | {row['measure']} | {row['after']:.1f} | {row['samples']} |\n" for row in checks
    )
    return f"\nJudged on held-out data before it was deployed, in percent:\n\n| task | measure | value | samples |\n|---|---|---|---|\n{rows}"


def _front_matter(base: Origin, library: str, checks: Sequence[JsonObject]) -> str:
    """What the hub reads; a base on somebody's disk has no name there."""
    lines = [f"library_name: {library}", "tags: [mergeway, merge, continual-model-merging]"]
    if found := hub_id(base.source):
        relation = "adapter" if library == "peft" else "merge"
        lines += [f"base_model: {json.dumps(found.repo)}", f"base_model_relation: {relation}"]
    if licence := licence_of(base.directory):
        lines.append(f"license: {json.dumps(licence)}")
    if checks:
        lines.append(f"metrics: {json.dumps(sorted({_METRICS[row['measure']] for row in checks}))}")
        # JSON is YAML too, and nothing in a name can break out of it.
        lines.append(f"model-index: {json.dumps(_model_index(base, checks))}")
    return "\n".join(lines)


def _model_index(base: Origin, checks: Sequence[JsonObject]) -> list[JsonObject]:
    """Results as the hub shows them beside a model; the data is that of whoever checked, so it goes by the task's name."""
    results: list[JsonObject] = []
    for row in checks:
        task, kind = printable(str(row["task"])), _METRICS[row["measure"]]
        results.append(
            {
                "task": {"type": _what_it_does(base.directory)},
                "dataset": {"name": task, "type": task},
                "metrics": [{"type": kind, "value": row["after"] / 100, "name": f"{row['measure']} on {task}"}],
            }
        )
    return [{"name": "merged model", "results": results}]


def _what_it_does(directory: Path | None) -> str:
    file = directory / "config.json" if directory else None
    config = read_json(file, "the base's config") if file and file.is_file() else {}
    architecture = str((config.get("architectures") or [""])[0])
    return next((name for end, name in _WHAT_IT_DOES.items() if architecture.endswith(end)), "other")
