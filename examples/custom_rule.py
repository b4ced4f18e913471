"""A rule of your own in twenty lines: an average in which no entry of an arrival moves further than a limit.

python examples/custom_rule.py

The rule lives in this file alone: `--rule examples/custom_rule.py:Clipped` works too. `examples/rule_package` shows how a
package adds a rule that everybody who installs it can call by its name.
"""

from dataclasses import dataclass

import torch

import mergeway as mw


@dataclass(frozen=True)
class Clipped(mw.rules.PartRule):
    """Ψ_k = ψ_0 + Σ w_i clip(δ_i) / W_k, every entry of clip(δ) within ±limit."""

    name = "clipped"
    title = "weighted average of clipped updates"
    paper = "none"

    limit: float = 1.0

    def fold(self, at, part, delta, state):
        return {"sum": state["sum"] + at.weight * delta.clamp(-self.limit, self.limit)}

    def update(self, at, part, state):
        return state["sum"] / at.total


if __name__ == "__main__":
    base = {"layer.weight": torch.zeros(2, 2)}
    arrivals = [{"layer.weight": torch.full((2, 2), float(k))} for k in (1, 2, 9)]
    print("average", mw.merge(base, arrivals)["layer.weight"][0, 0].item())
    print("clipped", mw.merge(base, arrivals, rule=Clipped(limit=3.0))["layer.weight"][0, 0].item())
