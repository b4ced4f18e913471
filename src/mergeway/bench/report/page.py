"""From numbers to one HTML file: template, style, script, charting library and data, all in it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path

from mergeway import __version__
from mergeway.core.files import make_directory, regular, replace_text
from mergeway.core.printed import printable
from mergeway.errors import OptionError

MARK = "<!-- mergeway report -->"
_HERE = Path(__file__).parent / "page"
# The part of plotly.js that draws lines, heat maps and histograms, packed; the browser unpacks it. CONTRIBUTING says where it is from.
_PLOTLY = _HERE / "plotly-cartesian.min.js.gz"


def write_page(data: Mapping[str, object], out: Path) -> Path:
    """Write the page of a run or a trunk; a file that is not a report of ours is never replaced."""
    if out.is_dir() or (out.exists() and MARK not in _opening(out)):
        raise OptionError(f"--out {out}: exists and is not a report; choose another file")
    make_directory(out.parent)
    replace_text(out, render(data))
    return out


def render(data: Mapping[str, object]) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["options"] = lambda label: ", ".join(label.split(":")[1:])
    shown = _shown(data)
    return environment.get_template(f"{data['kind']}.html").render(
        data=shown,
        embedded=as_script(shown),
        version=__version__,
        mark=MARK,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
        plotly=base64.b64encode(_PLOTLY.read_bytes()).decode(),
    )


def as_script(data: object) -> str:
    """JSON that may stand inside a script element: no '<', and no number that JSON does not know."""
    return json.dumps(_finite(data), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _shown(value: object) -> object:
    """Names come from files: what would turn the direction of writing, or is no character of a page, is spelled out."""
    if isinstance(value, str):
        return printable(value, keep="\n")
    if isinstance(value, Mapping):
        return {_shown(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value


def _opening(path: Path) -> str:
    regular(path)
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(400)
