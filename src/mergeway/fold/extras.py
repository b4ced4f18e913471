"""What an arrival brings besides its weights: moments from a file, or what its own data says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mergeway.calibration.objective import Predict
from mergeway.calibration.samples import Samples
from mergeway.calibration.statistics import fisher_diagonal, gram_matrices
from mergeway.checkpoint.moments import Moments, correction, moments_beside
from mergeway.errors import OptionError
from mergeway.fold.prepare import Arrival, Base
from mergeway.rules.fisher import Fisher
from mergeway.rules.rule import Rule, WantsGrams, WantsMoments

# Moments as a user gives them: a file, or tensors by name.
Given = str | Path | Mapping[str, Tensor] | None
# The model as a function of parameters, and the samples of the arrival's task.
Data = Callable[[], tuple[Predict, Samples]]


def with_extras(rule: Rule, base: Base, arrival: Arrival, moments: Given = None, data: Data | None = None) -> Arrival:
    """The arrival with what its rule wants; moments are looked at now, data when the fold begins."""
    if not isinstance(rule, WantsMoments) and moments is not None:
        raise OptionError(f"rule '{rule.name}' uses no moments; leave out --moments")
    if isinstance(rule, WantsMoments):
        found = moments if moments is not None else moments_beside(arrival.checkpoint.source)
        if found is not None:
            return replace(arrival, extras=_from_moments(rule, base, found))
        if data is None:
            raise OptionError(
                f"{arrival.checkpoint.source}: rule '{rule.name}' needs moments and there is no moments.safetensors beside it; give --moments FILE, or --data and --head for an empirical Fisher"
            )
        return replace(arrival, extras=_from_data(fisher_diagonal, base, arrival, data))
    if isinstance(rule, WantsGrams):
        if data is None:
            raise OptionError(f"rule '{rule.name}' needs calibration data: give --data and --head with the arrival")
        return replace(arrival, extras=_from_data(gram_matrices, base, arrival, data))
    return arrival


def _from_moments(
    rule: Rule, base: Base, moments: str | Path | Mapping[str, Tensor]
) -> Callable[[], Mapping[str, Tensor]]:
    opened = Moments(moments, base.merged_infos, base.tied, base.is_head)
    if not (isinstance(rule, Fisher) and rule.debias):
        return lambda: opened
    if isinstance(moments, Mapping):
        raise OptionError("moments given as tensors say no step and beta2; write them to a file, or leave out debias")
    factor = correction(Path(moments))
    return lambda: {name: factor * tensor.float() for name, tensor in opened.items()}


def _from_data(
    ask: Callable[[Predict, Mapping[str, Tensor], Samples], dict[str, Tensor]], base: Base, arrival: Arrival, data: Data
) -> Callable[[], Mapping[str, Tensor]]:
    def extras() -> Mapping[str, Tensor]:
        predict, samples = data()
        found = ask(predict, {n: arrival.read(n) for n in base.merged_infos if base.stored_as(n) == n}, samples)
        return found | {alias: found[name] for alias, name in base.tied.items() if name in found}

    return extras
