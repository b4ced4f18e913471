"""A rule of your own in twenty lines: an exponential moving average, so that the past fades at a rate you choose.

python examples/custom_rule.py
"""

from dataclasses import dataclass

import torch

import mergeway as mw


@dataclass(frozen=True)
class Ema(mw.rules.PartRule):
    """Δ_k = (1 − rate)·Δ_{k−1} + rate·δ_k; the first arrival is taken whole."""

    name = "ema"
    title = "exponential moving average of the updates"
    paper = "none"
    slots = ("update",)

    rate: float = 0.2

    def fold(self, at, part, delta, state):
        return {"update": state["update"].lerp(delta, self.rate if at.step > 1 else 1.0)}

    def update(self, at, part, state):
        return state["update"]


base = {"layer.weight": torch.zeros(2, 2)}
arrivals = [{"layer.weight": torch.full((2, 2), float(k))} for k in (1, 2, 3)]
print("average", mw.merge(base, arrivals)["layer.weight"][0, 0].item())
print("ema    ", mw.merge(base, arrivals, rule=Ema(rate=0.5))["layer.weight"][0, 0].item())
