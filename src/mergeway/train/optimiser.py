"""Second moments from a saved optimiser: parameter numbers become names through the model they were numbered by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from torch import Tensor

from mergeway.checkpoint.naming import names_of, outline
from mergeway.checkpoint.pickled import load_weights_only
from mergeway.checkpoint.source import read_json
from mergeway.errors import CheckpointError, OptionError

# What a Trainer leaves without weight decay, by name: as it does now, and as it did before norms had names of their own.
_NO_DECAY = (
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)",
    r"bias",
)


class _Numbered(TypedDict):
    params: list[int]


class _Group(_Numbered, total=False):
    param_names: list[str]
    betas: tuple[float, float]


class _Saved(TypedDict):
    """The state of a torch optimiser: what it keeps of each parameter, by number."""

    state: dict[int, dict[str, Tensor]]
    param_groups: list[_Group]


@dataclass(frozen=True)
class Captured:
    """Second moments by name, the optimiser's step and its β₂."""

    moments: dict[str, Tensor]
    step: int | None
    beta2: float | None


def read_optimiser(path: Path, model: Path | None = None, only: str | None = None) -> Captured:
    """The moments in a Trainer's checkpoint directory or in a file of optimiser state."""
    file = path / "optimizer.pt" if path.is_dir() else path
    home = model or (path if path.is_dir() else path.parent)
    state = _load(file)
    groups: list[list[int]] = [list(g["params"]) for g in state["param_groups"]]
    held = state["state"]
    named = [names for g in state["param_groups"] if (names := g.get("param_names")) is not None]
    if len(named) == len(groups):
        names = {i: n for g, ns in zip(groups, named, strict=True) for i, n in zip(g, ns, strict=True)}
    else:
        names = _match(file, groups, held, _parameters(home, only), home)
    module = names_of(home)
    moments, step = {}, None
    for number, row in held.items():
        if "exp_avg_sq" not in row:
            raise CheckpointError(
                f"{file}: parameter {number} has {', '.join(map(str, row)) or 'nothing'} and no exp_avg_sq; only Adam's kind keeps second moments"
            )
        # A checkpoint may store a tensor under another name than the module, which the optimiser knew.
        name = module.stored(names[number]) if module else names[number]
        moments[name] = row["exp_avg_sq"].float()
        step = int(row["step"]) if "step" in row else step
    betas = state["param_groups"][0].get("betas")
    return Captured(moments, step, float(betas[1]) if betas else None)


def _load(file: Path) -> _Saved:
    loaded = load_weights_only(file)
    for key in ("optimizer", "optimizer_state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not isinstance(loaded.get("state"), dict) or not loaded.get("param_groups"):
        raise CheckpointError(f"{file}: not the state of a torch optimiser (no 'state' and 'param_groups')")
    if not loaded["state"]:
        raise CheckpointError(f"{file}: the optimiser has not made a step yet")
    return _Saved(state=loaded["state"], param_groups=loaded["param_groups"])


def _parameters(home: Path, only: str | None) -> list[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether it is a norm's, of each parameter in the order of the model's own class."""
    config = home / "config.json"
    if not config.exists():
        raise OptionError(
            f"{home}: no config.json to number the parameters by; give the model's directory with --model"
        )
    architecture = (read_json(config, "the model's config").get("architectures") or [None])[0]
    model = outline(home)
    if model is None:
        raise OptionError(
            f"{config}: transformers makes no model of architecture '{architecture}' from it, so that its parameters have no order; give another directory with --model"
        )
    norms = {
        f"{n}.{p}" for n, m in model.named_modules() if "Norm" in type(m).__name__ for p, _ in m.named_parameters()
    }
    try:
        wanted = re.compile(only or "")
    except re.error as problem:
        raise OptionError(f"--only {only!r}: not a regular expression ({problem})") from None
    return [(n, tuple(p.shape), n in norms) for n, p in model.named_parameters() if wanted.search(n)]


def _match(
    file: Path,
    groups: Sequence[Sequence[int]],
    held: Mapping[int, Mapping[str, Tensor]],
    known: Sequence[tuple[str, tuple[int, ...], bool]],
    home: Path,
) -> dict[int, str]:
    """The names of the numbers, if only one naming fits all shapes."""
    shapes = {n: s for n, s, _ in known}
    found: list[dict[int, str]] = []
    for dealt in _dealings(known, len(groups)):
        if [len(g) for g in groups] != [len(names) for names in dealt]:
            continue
        named = {i: n for g, names in zip(groups, dealt, strict=True) for i, n in zip(g, names, strict=True)}
        fits = all(tuple(row["exp_avg_sq"].shape) == shapes[named[i]] for i, row in held.items() if "exp_avg_sq" in row)
        if fits and named not in found:
            found.append(named)
    if len(found) == 1:
        return found[0]
    count = sum(len(g) for g in groups)
    if count != len(known):
        raise CheckpointError(
            f"{file}: the optimiser has {count} parameters, the model in {home} has {len(known)}; say which were trained with --only REGEX, or give another --model"
        )
    raise CheckpointError(
        f"{file}: its {len(groups)} groups of {', '.join(str(len(g)) for g in groups)} parameters cannot be matched with the model in {home}"
        + (" in one way only" if found else "; the shapes differ")
    )


def _dealings(known: Sequence[tuple[str, tuple[int, ...], bool]], groups: int) -> Iterator[list[list[str]]]:
    """How parameters may be dealt out to groups: all in one, or a Trainer's with and without decay."""
    if groups == 1:
        yield [[n for n, _, _ in known]]
    if groups == 2:
        for pattern in _NO_DECAY:
            bare = {n for n, _, norm in known if norm or re.search(pattern, n, re.IGNORECASE)}
            yield [[n for n, _, _ in known if n not in bare], [n for n, _, _ in known if n in bare]]
        yield [[n for n, s, _ in known if len(s) >= 2], [n for n, s, _ in known if len(s) < 2]]
