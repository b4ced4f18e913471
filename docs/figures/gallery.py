"""Bring the pages up to date with what `mergeway bench SUITE --table .. --figure .. --out DIR` wrote.

    python docs/figures/gallery.py DIR [DIR..]

Tables go between their marks, figures into docs/gallery/; what no directory holds stays as it is. What a directory SUITE-paper
holds goes under the suite's name; other directories are of `digits`.
"""

import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent
PAGES = (DOCS / "gallery.md", DOCS / "benchmarks.md")


def place(folder: Path, name: str) -> str:
    """Where a table or figure belongs."""
    suite = folder.name.removesuffix("-paper")
    return f"{suite}/{name}" if suite != folder.name else name


def fill(page: str, folder: Path) -> str:
    """The page with the tables of a directory in the place of those it had."""
    for path in sorted((folder / "tables").glob("*.md")):
        mark = f"<!-- table {place(folder, path.stem)} -->"
        body = path.read_text(encoding="utf-8")
        page = re.sub(
            rf"{mark}\n.*?<!-- end -->", lambda _, m=mark, b=body: f"{m}\n\n{b}\n<!-- end -->", page, flags=re.S
        )
    return page


def main(folders: list[str]) -> None:
    """Fill in the tables and copy the figures."""
    for folder in (Path(folder).resolve() for folder in folders):
        for page in PAGES:
            page.write_text(fill(page.read_text(encoding="utf-8"), folder), encoding="utf-8")
        for path in sorted((folder / "figures").glob("*.*")):
            goal = DOCS / "gallery" / place(folder, path.name)
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, goal)


if __name__ == "__main__":
    main(sys.argv[1:])
