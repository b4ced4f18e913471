"""Bring docs/gallery.md up to date with what `mergeway bench digits --table .. --figure .. --out DIR` wrote.

    python docs/figures/gallery.py DIR [DIR..]

Tables go between their marks on the page, figures into docs/gallery/; what no directory holds stays as it is.
"""

import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent
PAGE = DOCS / "gallery.md"


def fill(page: str, folder: Path) -> str:
    """The page with the tables of a directory in the place of those it had."""
    for path in sorted((folder / "tables").glob("*.md")):
        mark = f"<!-- table {path.stem} -->"
        body = path.read_text(encoding="utf-8")
        page = re.sub(
            rf"{mark}\n.*?<!-- end -->", lambda _, m=mark, b=body: f"{m}\n\n{b}\n<!-- end -->", page, flags=re.S
        )
    return page


def main(folders: list[str]) -> None:
    """Fill in the tables and copy the figures."""
    page = PAGE.read_text(encoding="utf-8")
    (DOCS / "gallery").mkdir(exist_ok=True)
    for folder in map(Path, folders):
        page = fill(page, folder)
        for path in sorted((folder / "figures").glob("*.*")):
            shutil.copy(path, DOCS / "gallery" / path.name)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
