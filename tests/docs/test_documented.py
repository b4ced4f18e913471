"""Nothing that a user can name is undocumented, and nothing documented is made up."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from functools import cache

import pages
import pytest
from typer.main import get_command

import mergeway
from mergeway.cli.app import app, register
from mergeway.rules import RULES

ROOT, DOCS = pages.ROOT, pages.DOCS
register()
COMMANDS = get_command(app).commands
SHARED = {"--help", "--quiet", "-q", "--debug", "--version", "--install-completion", "--show-completion"}


@cache
def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def options_of(command: str) -> set[str]:
    """The options of a command and of its sub-commands."""
    every = [COMMANDS[command], *getattr(COMMANDS[command], "commands", {}).values()]
    return {name for each in every for param in each.params for name in param.opts if name.startswith("-")}


def section(text: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"there is no section '{title}'"
    return found[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_a_page_with_its_options(command):
    page = read(f"docs/commands/{command}.md")
    synopsis = re.search(r"```text\n(.*?)```", page, re.S)
    assert synopsis and f"mergeway {command}" in synopsis[1]
    for option in options_of(command) - {"--help"}:
        assert option in synopsis[1], f"{option} is not in the synopsis"
        assert f"| `{option}`" in page, f"{option} has no row in a table"
    assert f"[`mergeway {command}`]({command}.md)" in read("docs/commands/index.md")


def test_no_page_for_a_command_or_rule_that_is_not_there():
    assert {p.stem for p in (DOCS / "commands").glob("*.md")} == {*COMMANDS, "index"}
    assert {p.stem for p in (DOCS / "rules").glob("*.md")} == {*RULES, "index"}


@pytest.mark.parametrize("name", RULES)
def test_rule_has_a_page_with_its_options_and_defaults(name):
    page = read(f"docs/rules/{name}.md")
    for field in dataclasses.fields(RULES[name]):
        row = re.search(rf"^\| `{field.name}` \| (.*?) \|", page, re.M)
        assert row, f"option {field.name} has no row on the page of {name}"
        default = row[1].strip("`")
        if field.default is None:
            assert default, f"{field.name}: the page does not say what happens when it is not given"
        elif isinstance(field.default, bool):
            assert default == ("on" if field.default else "off")
        elif isinstance(field.default, str):
            assert default == field.default
        else:
            assert float(default) == field.default
    for heading in (
        "Options" if not dataclasses.fields(RULES[name]) else "| option |",
        "Utilities",
        "State",
        "Deviations",
    ):
        assert heading in page, f"the page of {name} does not speak of {heading}"
    assert re.search(r"zero updates", page, re.I), f"the page of {name} does not say what a zero update gives"
    works = "[`remove`](../commands/remove.md) works" in page
    assert works == issubclass(RULES[name], mergeway.rules.Removable)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("page", ["README.md", "docs/rules/index.md", "docs/which-rule.md"])
def test_rule_is_listed(page, name):
    assert f"`{name}`" in read(page)
    if page != "docs/which-rule.md":
        row = next(line for line in read(page).splitlines() if line.startswith(f"| [`{name}`]"))
        for field in dataclasses.fields(RULES[name]):
            assert f"`{field.name}`" in row


def deviating_modules() -> list[str]:
    """The rules, or packages, whose code says that it deviates."""
    found = set()
    for path in (ROOT / "src" / "mergeway").rglob("*.py"):
        if re.search(r"^\s*Deviates:", path.read_text(encoding="utf-8"), re.M):
            inside = path.relative_to(ROOT / "src" / "mergeway").with_suffix("").parts
            found.add(inside[1].replace("_", "-") if inside[0] == "rules" else inside[0])
    return sorted(found)


def test_some_code_deviates():
    assert {"opcm", "ties", "task-arithmetic", "magmax", "iso", "dop"} <= set(deviating_modules())


@pytest.mark.parametrize("name", deviating_modules())
def test_deviation_is_explained(name):
    assert len(section(read("docs/fidelity.md"), name).split()) > 10


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_section_in_fidelity(name):
    assert section(read("docs/fidelity.md"), name).strip()


@pytest.mark.parametrize("name", [n for n in mergeway.__all__ if n != "rules"])
def test_public_name_is_documented(name):
    assert f"`mw.{name}`" in read("docs/python.md")


def public_rules() -> list[str]:
    module = mergeway.rules
    return [
        name
        for name, value in vars(module).items()
        if name == "RULES"
        or (
            not name.startswith("_")
            and getattr(value, "__module__", "").startswith(module.__name__)
            and callable(value)
        )
    ]


@pytest.mark.parametrize("name", public_rules())
def test_name_of_rules_is_documented(name):
    assert re.search(rf"`rules\.{name}\b", read("docs/python.md"))


@pytest.mark.parametrize("name", [n for n in vars(mergeway.Trunk) if not n.startswith("_")])
def test_trunk_method_is_documented(name):
    page = read("docs/python.md")
    member = inspect.getattr_static(mergeway.Trunk, name)
    if isinstance(member, property):
        assert f"`{name}`" in page
        return
    shown = re.search(rf"(?:\| `|Trunk\.){name}\((.*?)\)(?:`| ->)", page, re.S)
    assert shown, f"Trunk.{name} has no signature on the page"
    parameters = inspect.signature(getattr(mergeway.Trunk, name)).parameters
    hidden = {"self", "journal"}
    assert {p.strip("* \n").split("=")[0] for p in shown[1].split(",")} - {""} == set(parameters) - hidden


@pytest.mark.parametrize("name", ["merge", "merge_into"])
def test_signature_is_the_real_one(name):
    shown = re.search(rf"^mw\.{name}\((.*?)\) ->", read("docs/python.md"), re.M | re.S)
    assert shown
    names = [p.strip("* \n").split("=")[0] for p in shown[1].split(",")]
    assert [n for n in names if n] == list(inspect.signature(getattr(mergeway, name)).parameters)


def shell_lines(text: str) -> list[str]:
    """Command lines of console and sh blocks, and commands in running text that have arguments."""
    lines = pages.commands(text)
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
        lines += block.splitlines()
    return lines + re.findall(r"`(mergeway [a-z]+[^`…]*)`", text)


def mergeway_calls() -> list[tuple[str, str]]:
    found = []
    for path in [*pages.pages(), ROOT / "CONTRIBUTING.md"]:
        for line in shell_lines(path.read_text(encoding="utf-8")):
            for call in re.split(r" (?:\||&&|;) ", line):
                words = call.split("mergeway ", 1)
                if re.match(r"^(?:\w+=\S+ )*mergeway ", call):
                    found.append((str(path.relative_to(ROOT)), words[1]))
    return found


@pytest.mark.parametrize(("page", "call"), sorted(set(mergeway_calls())))
def test_documented_command_is_real(page, call):
    words = [word for word in shlex.split(call, comments=True) if word not in SHARED]
    if not words:
        return
    assert words[0] in COMMANDS, f"{page}: there is no command '{words[0]}'"
    for word in words[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in options_of(words[0]), f"{page}: '{words[0]}' has no option {word}"


def test_calls_were_found():
    assert len(mergeway_calls()) > 60


def test_readme_begins_with_the_two_commands():
    top = read("README.md").splitlines()[:20]
    assert "make demo" in "\n".join(top)
    assert "make test" in "\n".join(top)
    makefile = read("Makefile")
    for target in set(re.findall(r"\bmake ([a-z-]+)", read("README.md") + read("CONTRIBUTING.md"))):
        if target not in ("sure", "a", "one"):
            assert re.search(rf"^{target}:", makefile, re.M), f"the Makefile has no target '{target}'"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(page)):
        assert (ROOT / target).exists(), f"{page}: {target}"


def test_layers_are_those_that_are_checked():
    listed = re.findall(r"^\| (`.*?) \|", section(read("CONTRIBUTING.md"), "Layers"), re.M)
    checked = re.search(r"^layers = \[\n(.*?)^\]", read("pyproject.toml"), re.M | re.S)
    assert checked
    names = [re.findall(r"mergeway\.(\w+)", line) for line in checked[1].splitlines()]
    assert [re.findall(r"`(\w+)`", row) for row in listed] == names


def test_figure_is_what_its_script_draws():
    namespace: dict = {"__name__": "figure", "__file__": str(DOCS / "figures" / "stream.py")}
    exec(read("docs/figures/stream.py"), namespace)
    assert namespace["drawing"]() == read("docs/figures/stream.svg")
