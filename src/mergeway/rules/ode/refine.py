"""A last refinement, which is not in the paper: a few steps of AdamW close to the merged model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mergeway.calibration.objective import Loss, as_objective
from mergeway.core.ranks import ALONE, Team
from mergeway.rules.ode.flat import FlatParams

RADIUS = 1e-3  # of the trust region, against ‖θ‖
RATE = 1e-6


def refine(
    params: Mapping[str, Tensor], loss: Loss, steps: int, lr: float = RATE, team: Team = ALONE
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """AdamW on the calibration samples, kept within 10⁻³‖θ‖ of where it started."""
    objective = as_objective(loss)
    flat = every_parameter(params, team)
    origin = flat.theta.clone()
    radius = RADIUS * math.sqrt(flat.square(origin))
    weights = flat.theta.detach().requires_grad_()
    weights.grad = flat.grad
    adam = torch.optim.AdamW([weights], lr=lr)
    losses: list[float] = []
    for _ in range(steps):
        losses.append(flat.gradient(objective))
        adam.step()  # pyright: ignore[reportUnknownMemberType]
        keep_within(flat, origin, radius)
    losses.append(flat.value(objective))
    return flat.release(), {"steps": steps, "losses": losses, "radius": radius}


def every_parameter(params: Mapping[str, Tensor], team: Team = ALONE) -> FlatParams:
    """Flat buffers in which every parameter moves: the target differs everywhere."""
    return FlatParams(params, {n: p + 1 if p.is_floating_point() else p for n, p in params.items()}, team)


def keep_within(flat: FlatParams, origin: Tensor, radius: float) -> None:
    """Bring θ back to within the radius of where it started."""
    with torch.no_grad():
        moved = math.sqrt(flat.team.add_up([float((flat.theta - origin).double().square().sum())])[0])
        if moved > radius:
            flat.theta.copy_(torch.lerp(origin, flat.theta, radius / moved))
