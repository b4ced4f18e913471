"""Fold a stream in Python: models in memory, every rule, what each keeps of the first and of the last arrival.

python examples/fold_a_stream.py
"""

import torch
from torch import nn

import mergeway as mw

torch.manual_seed(0)
base = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).state_dict()


def fine_tuned() -> dict[str, torch.Tensor]:
    """The base with a small update of its own; training would go here."""
    return {name: weight + 0.01 * torch.randn_like(weight) for name, weight in base.items()}


def update(model: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(model[name] - base[name]).flatten() for name in base])


arrivals = [fine_tuned() for _ in range(4)]
print(f"{'rule':<16} {'length':>6} {'first':>6} {'last':>6}")
for name, rule in mw.rules.RULES.items():
    if rule.needs:
        continue  # it wants data as well
    merged = update(mw.merge(base, arrivals, rule=name))
    kept = [float(merged @ update(a) / update(a).square().sum()) for a in arrivals]
    length = float(merged.norm() / update(arrivals[0]).norm())
    print(f"{name:<16} {length:6.2f} {kept[0]:6.2f} {kept[-1]:6.2f}")
