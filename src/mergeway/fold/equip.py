"""How an arrival gets what its rule wants besides weights: moments from a file, or what its own data says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeway.calibration.samples import Samples
from mergeway.calibration.statistics import fisher_diagonal, gram_matrices
from mergeway.checkpoint.moments import Moments, correction, moments_beside
from mergeway.errors import OptionError
from mergeway.fold.prepare import Arrival, Base
from mergeway.rules import Rule

# The model as a function of parameters, and the labelled samples of the arrival's task.
Data = Callable[[], tuple[Any, Samples]]


def equip(rule: Rule, base: Base, arrival: Arrival, moments: Any = None, data: Data | None = None) -> Arrival:
    """The arrival with what its rule wants; moments are looked at now, data when the fold begins."""
    if rule.brings != "moments" and moments is not None:
        raise OptionError(f"rule '{rule.name}' uses no moments; leave out --moments")
    if rule.brings == "moments":
        found = moments if moments is not None else moments_beside(arrival.checkpoint.source)
        if found is not None:
            return replace(arrival, bring=_from_moments(rule, base, found))
        if data is None:
            raise OptionError(
                f"{arrival.checkpoint.source}: rule '{rule.name}' needs moments and there is no moments.safetensors beside it; give --moments FILE, or --data and --head for an empirical Fisher"
            )
    elif rule.brings == "grams" and data is None:
        raise OptionError(f"rule '{rule.name}' needs calibration data: give --data and --head with the arrival")
    elif rule.brings is None:
        return arrival
    assert data is not None
    return replace(arrival, bring=_from_data(rule, base, arrival, data))


def _from_moments(rule: Rule, base: Base, moments: Any) -> Callable[[], Mapping[str, Tensor]]:
    opened = Moments(moments, base.merged_infos, base.tied, base.is_head)
    if not getattr(rule, "debias", False):
        return lambda: opened
    if isinstance(moments, Mapping):
        raise OptionError("moments given as tensors say no step and beta2; write them to a file, or leave out debias")
    factor = correction(Path(moments))
    return lambda: {name: factor * tensor.float() for name, tensor in opened.items()}


def _from_data(rule: Rule, base: Base, arrival: Arrival, data: Data) -> Callable[[], Mapping[str, Tensor]]:
    ask = fisher_diagonal if rule.brings == "moments" else gram_matrices

    def bring() -> Mapping[str, Tensor]:
        predict, samples = data()
        return ask(predict, {name: arrival.read(name) for name in base.merged_infos}, samples)

    return bring
