"""Draw docs/figures/stream.svg: arrivals that fold into a trunk one by one, with the journal below.

    python docs/figures/stream.py

Nothing rests on colour alone: arrivals are boxes, deployed models are discs, journal records are cards. The picture brings
its own background for a light and for a dark page.
"""

from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 960, 400
TRUNK_Y, ARRIVAL_Y, RECORD_Y = 190, 48, 262
STEPS = [("mnist", 1), ("svhn", 2), ("dtd", 1)]
XS = [110, 300, 490, 680]

STYLE = """
  .paper{fill:#ffffff;stroke:#d0d7de} .ink{fill:#1f2328} .soft{fill:#59636e}
  .line{stroke:#1f2328;fill:none} .thin{stroke:#59636e;fill:none} .tip{fill:#1f2328} .softtip{fill:#59636e}
  .trunk{stroke:#0b5fad;fill:none} .disc{fill:#0b5fad;stroke:#0b5fad} .on{fill:#ffffff}
  .box{fill:#fff3d6;stroke:#8a5a00} .card{fill:#f6f8fa;stroke:#59636e} .memory{fill:#dbeafe;stroke:#0b5fad}
  @media (prefers-color-scheme: dark){
    .paper{fill:#0d1117;stroke:#3d444d} .ink{fill:#f0f6fc} .soft{fill:#9198a1}
    .line{stroke:#f0f6fc} .thin{stroke:#9198a1} .tip{fill:#f0f6fc} .softtip{fill:#9198a1}
    .trunk{stroke:#6cb6ff} .disc{fill:#6cb6ff;stroke:#6cb6ff} .on{fill:#0d1117}
    .box{fill:#3a2d0c;stroke:#e3b341} .card{fill:#161b22;stroke:#9198a1} .memory{fill:#12304f;stroke:#6cb6ff}
  }
  text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}
  .mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}
"""


def text(x: float, y: float, words: str, size: int = 15, kind: str = "ink", anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rounded box, centred on x."""
    return f'<rect x="{x - width / 2}" y="{y}" width="{width}" height="{height}" rx="6" stroke-width="1.5" class="{kind}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "line", width: float = 1.8) -> str:
    """A straight arrow."""
    tip = "tip" if kind == "line" else "softtip"
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke-width="{width}" class="{kind}" marker-end="url(#{tip})"/>'


def model(x: float, y: float, name: str, number: str) -> list[str]:
    """A deployed model: a disc with its symbol."""
    return [
        f'<circle cx="{x}" cy="{y}" r="21" class="disc"/>',
        f'<text x="{x}" y="{y + 6}" font-size="18" text-anchor="middle" class="on">{name}'
        f'<tspan font-size="12" dy="4">{number}</tspan></text>',
    ]


def record(x: float, step: int, words: str) -> list[str]:
    """A journal record, and below it the memory that was committed together with it."""
    parts = [arrow(x, TRUNK_Y + 22, x, RECORD_Y - 3, "thin", 1.2), box(x, RECORD_Y, 132, 46, "card")]
    parts += [text(x, RECORD_Y + 19, f"step {step}", 13, "soft mono"), text(x, RECORD_Y + 37, words, 13, "ink mono")]
    if step:
        parts.append(arrow(x - 66, RECORD_Y + 23, x - 121, RECORD_Y + 23, "thin", 1.2))
        parts += [box(x, RECORD_Y + 62, 74, 18, "memory")]
    return parts


def drawing() -> str:
    """The whole picture."""
    parts = [f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" class="paper"/>']
    parts.append(f'<path d="M{XS[0]} {TRUNK_Y} H{XS[-1]}" stroke-width="9" class="trunk"/>')
    for x, (task, weight) in zip(XS[1:], STEPS, strict=True):
        parts.append(box(x, ARRIVAL_Y, 128, 46, "box"))
        parts += [
            text(x, ARRIVAL_Y + 20, task, 15, "ink mono"),
            text(x, ARRIVAL_Y + 38, f"weight {weight}", 12, "soft"),
        ]
        parts.append(arrow(x, ARRIVAL_Y + 47, x, TRUNK_Y - 26))
    parts.append(text(XS[1] + 10, 132, "rule folds it in", 13, "soft", "start"))
    for k, x in enumerate(XS):
        parts += model(x, TRUNK_Y, "Ψ" if k else "ψ", str(k))
    for k, x in enumerate(XS):
        parts += record(x, k, f"add {STEPS[k - 1][0]}" if k else "init")
    parts += [
        text(XS[0], ARRIVAL_Y + 20, "arrivals", 16, "ink"),
        text(XS[0], ARRIVAL_Y + 38, "fine-tuned checkpoints", 12, "soft"),
        text(XS[0], TRUNK_Y - 34, "base", 16, "ink"),
        text(XS[0], RECORD_Y + 75, "rule's memory", 13, "soft"),
        text(XS[-1] + 130, RECORD_Y + 75, "always the same size", 13, "soft"),
        text(XS[-1] + 130, RECORD_Y + 21, "journal", 16, "ink"),
        text(XS[-1] + 130, RECORD_Y + 39, "a hash chain", 12, "soft"),
        arrow(XS[-1] + 22, TRUNK_Y, XS[-1] + 72, TRUNK_Y),
        box(XS[-1] + 145, TRUNK_Y - 29, 132, 58, "card"),
        text(XS[-1] + 145, TRUNK_Y - 5, "deployed model", 14, "ink"),
        text(XS[-1] + 145, TRUNK_Y + 14, "export · rollback", 12, "soft"),
        text(
            WIDTH / 2,
            HEIGHT - 26,
            "Weights, memory and record of a step are committed together or not at all.",
            14,
            "soft",
        ),
    ]
    tips = "".join(
        f'<marker id="{kind}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L10 5 L0 10 z" class="{kind}"/></marker>'
        for kind in ("tip", "softtip")
    )
    title = "A stream of arrivals folding into a trunk: base, three folds, the deployed model, the journal"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{STYLE}</style><defs>{tips}</defs>" + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    OUT.write_text(drawing(), encoding="utf-8")
