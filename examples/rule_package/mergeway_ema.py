"""An exponential moving average of the updates: the past fades at a rate that you choose."""

from dataclasses import dataclass

from mergeway.rules import KeepsDeployed, PartRule


@dataclass(frozen=True)
class Ema(KeepsDeployed, PartRule):
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
