"""Draw docs/figures/rooms.svg: the ten rooms of the code as the floors of a house, and the walk of one `add` through them.

    python docs/figures/rooms.py

Nothing rests on colour alone: rooms are floors with their names, the walk is a line of numbered discs. The picture brings
its own background for a light and for a dark page.
"""

from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 960, 690
LEFT, RIGHT, TOP, FLOOR = 40, 920, 112, 50
NAME_X, WORDS_X = 82, 200
# From the top down; a room may import from the rooms below it.
ROOMS = [
    ("cli", "the commands: options in, tables and JSON out"),
    ("bench", "suites, the protocol, runs, tables, reports"),
    ("train", "fine-tuning: arrivals and their moments"),
    ("trunk", "the durable directory: commits, journal, export"),
    ("fold", "the only loop over a stream of arrivals"),
    ("rules", "the rules: tensors in, tensors out"),
    ("calibration", "data, samples, memory, the objective"),
    ("model", "running a model: device, precision, heads"),
    ("checkpoint", "reading, checking and writing weights"),
    ("core", "tensors, linear algebra, ranks, files"),
]
# The walk of one `add`: a room, what stands at the disc, where across the floor, and how far below the disc the words are.
ABOVE, BELOW = -14, 21
WALK = [
    ("cli", "add", 566, BELOW),
    ("trunk", "trunk.py", 606, BELOW),
    ("fold", "prepare.py", 656, BELOW),
    ("calibration", "samples", 706, BELOW),
    ("fold", "stream.py", 752, ABOVE),
    ("rules", "the rule", 796, BELOW),
    ("trunk", "commit.py", 826, ABOVE),
    ("trunk", "store.py", 888, ABOVE),
]

STYLE = """
  .paper{fill:#ffffff;stroke:#d0d7de} .ink{fill:#1f2328} .soft{fill:#59636e}
  .line{stroke:#1f2328;fill:none} .tip{fill:#1f2328}
  .roof{fill:#fff3d6;stroke:#8a5a00} .room{fill:#f6f8fa;stroke:#59636e} .loop{fill:#dbeafe;stroke:#0b5fad}
  .walk{stroke:#0b5fad;fill:none} .walktip{fill:#0b5fad} .disc{fill:#0b5fad} .on{fill:#ffffff}
  @media (prefers-color-scheme: dark){
    .paper{fill:#0d1117;stroke:#3d444d} .ink{fill:#f0f6fc} .soft{fill:#9198a1}
    .line{stroke:#f0f6fc} .tip{fill:#f0f6fc}
    .roof{fill:#3a2d0c;stroke:#e3b341} .room{fill:#161b22;stroke:#9198a1} .loop{fill:#12304f;stroke:#6cb6ff}
    .walk{stroke:#6cb6ff} .walktip{fill:#6cb6ff} .disc{fill:#6cb6ff} .on{fill:#0d1117}
  }
  text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}
  .mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}
"""


def text(x: float, y: float, words: str, size: int = 14, kind: str = "ink", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def floor_of(room: str) -> int:
    """Where the floor of a room begins."""
    return TOP + FLOOR * [name for name, _ in ROOMS].index(room)


def roof() -> list[str]:
    """The roof, with what lies at the top level of the package."""
    middle = (LEFT + RIGHT) / 2
    return [
        f'<path d="M{LEFT - 14} {TOP} L{middle} 22 L{RIGHT + 14} {TOP} Z" stroke-width="1.5" class="roof"/>',
        text(middle, 78, "mergeway", 22, "ink mono", "middle"),
        text(middle, 99, "__init__ · __main__ · errors", 13, "soft mono", "middle"),
    ]


def room(name: str, words: str) -> list[str]:
    """One floor: the room's name and what it is for."""
    y = floor_of(name)
    kind = "loop" if name == "fold" else "room"
    return [
        f'<rect x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="{FLOOR}" stroke-width="1.5" class="{kind}"/>',
        text(NAME_X, y + FLOOR / 2 + 5, name, 15, "ink mono"),
        text(WORDS_X, y + FLOOR / 2 + 5, words, 14),
    ]


def walk() -> list[str]:
    """The walk of one `add`: a line from disc to disc, along the floor and then up or down, and the file at each."""
    spots = [(x, floor_of(name) + FLOOR // 2) for name, _, x, _ in WALK]
    parts = []
    for (x1, y1), (x2, y2) in pairwise(spots):
        way = f"H{x2} V{y2 - 11 if y2 > y1 else y2 + 11}" if y1 != y2 else f"H{x2 - 11}"
        parts.append(f'<path d="M{x1} {y1} {way}" stroke-width="1.8" class="walk" marker-end="url(#walktip)"/>')
    for k, ((x, y), (_, words, _, below)) in enumerate(zip(spots, WALK, strict=True)):
        parts += [
            f'<circle cx="{x}" cy="{y}" r="9" class="disc"/>',
            text(x, y + 4, str(k), 12, "on", "middle"),
            text(x, y + below, words, 11, "ink mono", "middle"),
        ]
    return parts


def drawing() -> str:
    """The whole picture."""
    parts = [f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" class="paper"/>', *roof()]
    for name, words in ROOMS:
        parts += room(name, words)
    bottom = TOP + FLOOR * len(ROOMS)
    parts.append(
        f'<path d="M{LEFT + 20} {TOP + 14} V{bottom - 16}" stroke-width="1.8" class="line" marker-end="url(#tip)"/>'
    )
    parts += walk()
    parts += [
        text(
            WIDTH / 2, bottom + 30, "Imports point down only: a room may use the rooms below it.", 14, "soft", "middle"
        ),
        text(WIDTH / 2, bottom + 54, "0 to 7: the walk of one add through the house.", 14, "soft", "middle"),
    ]
    tips = "".join(
        f'<marker id="{kind}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L10 5 L0 10 z" class="{kind}"/></marker>'
        for kind in ("tip", "walktip")
    )
    title = "The ten rooms of mergeway as the floors of a house, and the walk of one add through them"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{STYLE}</style><defs>{tips}</defs>" + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    OUT.write_text(drawing(), encoding="utf-8")
