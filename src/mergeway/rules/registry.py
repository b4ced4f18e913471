"""The rules by name: mergeway's own, those that installed packages add, and any class you name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from pathlib import Path
from types import ModuleType

from mergeway import __version__
from mergeway.core.tensors import compiled
from mergeway.errors import OptionError, suggest
from mergeway.rules.average import Average
from mergeway.rules.dop import Dop
from mergeway.rules.fisher import Fisher
from mergeway.rules.iso import Iso
from mergeway.rules.magmax import Magmax
from mergeway.rules.ode.rule import Ode
from mergeway.rules.opcm import Opcm
from mergeway.rules.randmix import Randmix
from mergeway.rules.regmean import Regmean
from mergeway.rules.rule import ModelRule, PartRule, Rule, SeesMatrices
from mergeway.rules.steer import Steer
from mergeway.rules.task_arithmetic import TaskArithmetic
from mergeway.rules.ties import Ties

GROUP = "mergeway.rules"
_OWN: tuple[type[Rule], ...] = (
    Average,
    TaskArithmetic,
    Ties,
    Opcm,
    Magmax,
    Randmix,
    Iso,
    Dop,
    Fisher,
    Regmean,
    Ode,
    Steer,
)


def find_rules() -> dict[str, type[Rule]]:
    """mergeway's rules, then those of the entry point group `mergeway.rules`; a package that does not load is left out."""
    found = {rule.name: rule for rule in _OWN}
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            warnings.warn(
                f"{_origin(entry)} names its rule '{entry.name}', which is taken; it is left out", stacklevel=2
            )
            continue
        try:
            found[entry.name] = _checked(entry.load(), entry.value)
        except Exception as problem:  # whatever another package does when it is imported
            warnings.warn(f"rule '{entry.name}' of {_origin(entry)} cannot be loaded ({problem})", stacklevel=2)
    return found


RULES: dict[str, type[Rule]] = {}


def rule_class(name: str) -> type[Rule]:
    """The rule of that name, or the class that `module:Class` or `file.py:Class` names."""
    if name in RULES:
        return RULES[name]
    module, colon, word = name.rpartition(":")
    if not colon:
        raise OptionError(f"there is no rule '{name}'; {suggest(name, RULES)}")
    found = getattr(_module(name, module), word, None)
    if found is None:
        raise OptionError(f"rule {name}: '{module}' has no class '{word}'")
    return _checked(found, name)


def make(rule: str | Rule, options: Mapping[str, object] | None = None) -> Rule:
    """The rule of that name with these options; a ready-made rule passes through."""
    if isinstance(rule, Rule):
        if options:
            raise OptionError(f"options {', '.join(options)} given beside a rule that already has its own")
        chosen = rule
    else:
        chosen = rule_class(rule).from_options(options or {})
    if isinstance(chosen, SeesMatrices) and chosen.linear is not None:
        compiled(chosen.linear)  # a bad one is reported now, not at the first fold
    return chosen


def reference(rule: Rule) -> str:
    """What a trunk writes down to find the rule again: its name, `module:Class`, or `/path/file.py:Class`."""
    kind = type(rule)
    return rule.name if RULES.get(rule.name) is kind else f"{kind.__module__}:{kind.__qualname__}"


@dataclass(frozen=True)
class Description:
    """A rule as a trunk writes it down: what a reader is told of it who does not have its class."""

    name: str
    title: str
    paper: str
    chosen: Mapping[str, object]
    origin: Mapping[str, str]

    @classmethod
    def of(cls, rule: Rule) -> Description:
        return cls(rule.name, rule.title, rule.paper, rule.options(), origin(type(rule)))

    def options(self) -> Mapping[str, object]:
        return self.chosen


@cache
def origin(rule: type[Rule]) -> dict[str, str]:
    """Where a rule's code is from: a package and its version, or a file and its digest."""
    top = rule.__module__.partition(".")[0]
    if top == "mergeway":
        return {"package": top, "version": __version__}
    named = [e for e in entry_points(group=GROUP) if e.value == f"{rule.__module__}:{rule.__qualname__}" and e.dist]
    packages = [e.dist.name for e in named if e.dist] or packages_distributions().get(top, [])
    if packages:
        return {"package": packages[0], "version": version(packages[0])}
    file = getattr(sys.modules.get(rule.__module__), "__file__", None)
    if file is None or not Path(file).is_file():
        return {"module": rule.__module__}
    return {"file": str(file), "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()}


def _module(name: str, where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")  # modules in the working directory count
            return importlib.import_module(where)
        path = Path(where).absolute()
        if not path.is_file():
            raise OptionError(f"rule {name}: there is no file {where}")
        return _load(path)
    except OptionError:
        raise
    except Exception as problem:  # whatever the user's own module does when it is imported
        raise OptionError(f"rule {name}: {where} cannot be imported ({type(problem).__name__}: {problem})") from None


def _load(path: Path) -> ModuleType:
    """A file as a module whose name is its path: none that is there already, and one by which it is found again."""
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[str(path)] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
    return module


def _checked(found: object, name: str) -> type[Rule]:
    if not (isinstance(found, type) and issubclass(found, PartRule | ModelRule)):
        raise OptionError(f"rule {name}: is not a PartRule or ModelRule of mergeway.rules")
    for attribute in ("name", "title", "paper"):
        if not isinstance(getattr(found, attribute, None), str):
            raise OptionError(f"rule {name}: the class has no text '{attribute}'")
    return found


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
