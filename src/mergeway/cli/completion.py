"""What a shell offers behind a tab: rules and their options, suites and their tasks, the tasks and steps of a trunk.

A shell waits for the answer, so nothing here imports torch: rules are read from their source, trunks and suites from their files.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import typer

_ROOMS = Path(__file__).parents[1]
# By name alone; a test holds this to the suites that there are.
SUITES = (
    *("digits", "digits-light", "rotated-digits", "smol", "split-mnist", "stories", "vit"),
    *(f"clip-vit-{size}-{count}" for size in ("b32", "b16", "l14") for count in (8, 14, 20)),
    *(f"{name}-{count}" for name in ("imagenet-r", "cub-200", "cars") for count in (5, 10, 20)),
    *("cifar100-10", "cifar100-20", "cifar100-50", "domainnet", "imagenet-r-domains", "office-31", "office-home"),
)


def rule_options() -> dict[str, list[str]]:
    """The rules of this package and what each can be set to, from the class bodies in their source."""
    found: dict[str, list[str]] = {}
    for path in sorted((_ROOMS / "rules").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (name := _name(node)):
                found[name] = [
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                ]
    return found


def _name(node: ast.ClassDef) -> str | None:
    """What a rule is called; other classes are called nothing."""
    for part in node.body:
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name) and part.targets[0].id == "name":
            return (
                part.value.value if isinstance(part.value, ast.Constant) and isinstance(part.value.value, str) else None
            )
    return None


def rules(incomplete: str) -> list[str]:
    """The names of rules, those of other packages too."""
    others = [point.name for point in metadata.entry_points(group="mergeway.rules")]
    return _beginning([*rule_options(), *others], incomplete)


def several_rules(incomplete: str) -> list[str]:
    """The next of several rules with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _beginning([*rules(""), *([] if comma else ["all"])], last)]


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """What the rule on the line can be set to."""
    return _beginning([f"{key}=" for key in rule_options().get(str(ctx.params.get("rule")), [])], incomplete)


def suites(incomplete: str) -> list[str]:
    """Suites by name, and directories that hold one."""
    here = [f"{path.parent}" for path in Path().glob("*/suite.json")]
    return _beginning([*SUITES, *here], incomplete)


def suite_tasks(ctx: typer.Context, incomplete: str) -> list[str]:
    """The tasks of the suite on the line."""
    named = _first(ctx, "suite")
    inside = _ROOMS / "bench" / "suites" / named / "suite.json"
    described = _read(named / "suite.json") or _read(inside)
    tasks = described[0].get("tasks", []) if described else []
    return _beginning([*(str(task.get("name")) for task in tasks), "all"], incomplete)


def trunk_tasks(ctx: typer.Context, incomplete: str) -> list[str]:
    """The tasks that the trunk on the line has seen, the last first."""
    return _beginning(_tasks(ctx), incomplete)


def trunk_task_pairs(ctx: typer.Context, incomplete: str) -> list[str]:
    """The same, before an equals sign."""
    return _beginning([f"{task}=" for task in _tasks(ctx)], incomplete)


def trunk_steps(ctx: typer.Context, incomplete: str) -> list[str]:
    """The steps of the trunk on the line, and their tags."""
    trunk = _first(ctx, "trunk")
    tags = _read(trunk / "tags.json")
    numbers = [str(record.get("step")) for record in _read(trunk / "journal.jsonl")]
    return _beginning([*(tags[0] if tags else ()), *reversed(numbers)], incomplete)


def _tasks(ctx: typer.Context) -> list[str]:
    records = _read(_first(ctx, "trunk") / "journal.jsonl")
    return list(dict.fromkeys(str(r["task"]) for r in reversed(records) if r.get("task")))


def _first(ctx: typer.Context, name: str) -> Path:
    """The first argument of a command; behind an option without a value it is not named yet."""
    return Path(str(ctx.params.get(name) or next(iter(ctx.args), "")))


def _read(path: Path) -> list[dict[str, list[dict[str, object]]]]:
    """The JSON objects of a file, one or one a line; what cannot be read is nobody's fault while a line is being typed."""
    try:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]
    except (OSError, ValueError):
        return []


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in _once(words) if word.startswith(incomplete)]


def _once(words: Iterable[str]) -> Iterator[str]:
    yield from dict.fromkeys(words)
