"""`mergeway rules`: what there is, what each needs, with defaults and paper."""

from __future__ import annotations

from typing import TypedDict

from mergeway.cli.app import COMPARE, app
from mergeway.cli.options import Json


class RuleRow(TypedDict):
    """A rule as `rules --json` lists it."""

    rule: str
    title: str
    options: dict[str, object]
    needs: list[str]
    remove: bool
    paper: str


@app.command(rich_help_panel=COMPARE)
def rules(as_json: Json = False) -> None:
    """List the rules: what each does and needs, its options with defaults, and where it is from."""
    from mergeway.cli.display import console, print_json, table

    rows = describe_rules()
    if as_json:
        print_json(rows)
        return
    cells = [
        (
            r["rule"],
            r["title"],
            ", ".join(f"{k}={_plain(v)}" for k, v in r["options"].items()) or "-",
            ", ".join(r["needs"]) or "-",
            "yes" if r["remove"] else "no",
            r["paper"],
        )
        for r in rows
    ]
    console().print(table(("rule", "what it does", "options", "needs", "remove", "from"), cells, whole=("rule",)))


def describe_rules() -> list[RuleRow]:
    """Every rule as plain data."""
    from mergeway.rules import RULES, Removable

    return [
        {
            "rule": name,
            "title": rule.title,
            "options": rule().options(),
            "needs": sorted(rule.needs),
            "remove": issubclass(rule, Removable),
            "paper": rule.paper,
        }
        for name, rule in RULES.items()
    ]


def _plain(value: object) -> str:
    return "auto" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
