"""Draw docs/figures/path.svg: the loss along a trajectory of `ode` and along the straight line, and the damping γ below.

    python docs/figures/path.py

The curves are two runs of `mergeway.trajectory` over a small landscape with a hill on the way. Nothing rests on colour alone:
the path is solid, the straight line dashed, the envelope dotted, and each has its name beside it.
"""

from pathlib import Path
from xml.sax.saxutils import escape

import torch

import mergeway as mw

OUT = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 960, 430
LEFT, RIGHT, TOP, BOTTOM = 80, 760, 56, 290
GAMMA_TOP, GAMMA_BOTTOM = 320, 374
LOSSES = (0.0, 1.0)

STYLE = """
  .paper{fill:#ffffff;stroke:#d0d7de} .ink{fill:#1f2328} .soft{fill:#59636e} .axis{stroke:#59636e;fill:none}
  .path{stroke:#0b5fad;fill:none} .pathname{fill:#0b5fad} .line{stroke:#8a5a00;fill:none} .linename{fill:#8a5a00}
  .envelope{stroke:#1f2328;fill:none} .damped{fill:#dbeafe} .gamma{stroke:#0b5fad;fill:none}
  @media (prefers-color-scheme: dark){
    .paper{fill:#0d1117;stroke:#3d444d} .ink{fill:#f0f6fc} .soft{fill:#9198a1} .axis{stroke:#9198a1}
    .path{stroke:#6cb6ff} .pathname{fill:#6cb6ff} .line{stroke:#e3b341} .linename{fill:#e3b341}
    .envelope{stroke:#f0f6fc} .damped{fill:#12304f} .gamma{stroke:#6cb6ff}
  }
  text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}
"""


def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
    """A hill a little beside the straight way, in a shallow bowl, so that the way first falls, then climbs, then falls."""
    x = params["x"]
    hill, bottom = (torch.tensor(centre, dtype=x.dtype) for centre in ([0.0, -0.25], [-0.8, 0.0]))
    return 0.05 + 0.75 * torch.exp(-((x - hill) ** 2).sum() / 0.2) + 0.1 * ((x - bottom) ** 2).sum()


def walk(barrier: str) -> mw.Trajectory:
    """The trajectory from one side of the hill to the other."""
    start, target = (torch.tensor(end, dtype=torch.float64) for end in ([-1.3, 0.0], [0.75, 0.05]))
    return mw.trajectory({"x": start}, {"x": target}, loss, 1.0, "rk4", 0.01, barrier=barrier)


def damped_spans(path: mw.Trajectory) -> list[tuple[float, float]]:
    """The stretches of time with γ < 1."""
    spans: list[tuple[float, float]] = []
    for before, t, gamma in zip(path.times, path.times[1:], path.gammas, strict=False):
        if gamma < 1:
            spans = [*spans[:-1], (spans[-1][0], t)] if spans and spans[-1][1] == before else [*spans, (before, t)]
    return spans


def at_time(t: float) -> float:
    """Where a time lies from left to right."""
    return LEFT + t * (RIGHT - LEFT)


def at_loss(value: float) -> float:
    """Where a loss lies from top to bottom."""
    return BOTTOM - (value - LOSSES[0]) / (LOSSES[1] - LOSSES[0]) * (BOTTOM - TOP)


def at_gamma(value: float) -> float:
    """Where a damping lies in its strip."""
    return GAMMA_BOTTOM - value * (GAMMA_BOTTOM - GAMMA_TOP)


def curve(points: list[tuple[float, float]], kind: str, width: float, dash: str = "") -> str:
    """A line through points of the page."""
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{way}" stroke-width="{width}" stroke-dasharray="{dash}" class="{kind}"/>'


def text(x: float, y: float, words: str, kind: str = "soft", anchor: str = "start", size: int = 14) -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def drawing() -> str:
    """The whole picture."""
    path, line = walk("path"), walk("none")
    assert min(path.gammas) < 1, "the picture is of a path that is damped"
    start, gap = path.loss_start, path.gap
    spans = damped_spans(path)
    widest = max(spans, key=lambda span: span[1] - span[0])
    parts = [f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" class="paper"/>']
    for first, last in spans:
        parts.append(
            f'<rect x="{at_time(first):.1f}" y="{TOP}" width="{at_time(last) - at_time(first):.1f}" '
            f'height="{GAMMA_BOTTOM - TOP}" class="damped"/>'
        )
    for bottom, top in ((BOTTOM, TOP), (GAMMA_BOTTOM, GAMMA_TOP)):
        parts.append(curve([(LEFT, top), (LEFT, bottom), (RIGHT, bottom)], "axis", 1))
    parts.append(
        curve([(at_time(t), at_loss(v)) for t, v in zip(line.times, line.losses, strict=True)], "line", 2.2, "7 5")
    )
    parts.append(curve([(at_time(t), at_loss(start + t * max(gap, 0.0))) for t in (0.0, 1.0)], "envelope", 1.6, "2 4"))
    parts.append(curve([(at_time(t), at_loss(v)) for t, v in zip(path.times, path.losses, strict=True)], "path", 3))
    parts.append(curve([(at_time(t), at_gamma(g)) for t, g in zip(path.times, path.gammas, strict=True)], "gamma", 2.2))
    peak = max(range(len(line.losses)), key=lambda k: line.losses[k])
    ends = RIGHT + 12
    parts += [
        text(LEFT, 34, "loss on the calibration samples", "ink", size=15),
        text(at_time(line.times[peak]), at_loss(line.losses[peak]) - 10, "straight line", "linename", "middle"),
        text(ends, at_loss(path.losses[-1]) + 20, "path", "pathname"),
        text(ends, at_loss(start + max(gap, 0.0)) - 12, "L(θ0) + t·max(ΔL, 0)", "ink"),
        text(at_time(widest[0]) + 8, TOP + 16, "damped: γ < 1", "soft", "start", 13),
        text(LEFT - 10, GAMMA_TOP + 5, "1", "soft", "end", 12),
        text(LEFT - 10, GAMMA_BOTTOM + 4, "0", "soft", "end", 12),
        text(ends, at_gamma(path.gammas[-1]) + 5, "damping γ", "pathname"),
    ]
    for t in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(text(at_time(t), GAMMA_BOTTOM + 18, f"{t:g}", "soft", "middle", 12))
    for value in (0.0, 0.5, 1.0):
        parts.append(text(LEFT - 10, at_loss(value) + 4, f"{value:g}", "soft", "end", 12))
    parts.append(
        text(
            (LEFT + RIGHT) / 2,
            HEIGHT - 16,
            "time t on the way from the deployed model to the arrival",
            "soft",
            "middle",
        )
    )
    title = "Loss along the trajectory of ode, which stays under its envelope, and along the straight line, which climbs a hill"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{STYLE}</style>" + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    OUT.write_text(drawing(), encoding="utf-8")
