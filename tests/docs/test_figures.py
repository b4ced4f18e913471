"""The committed figures are what their scripts draw."""

from __future__ import annotations

import runpy

import pages
import pytest

SCRIPTS = [path for path in sorted((pages.DOCS / "figures").glob("*.py")) if path.with_suffix(".svg").exists()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_figure_is_what_its_script_draws(script):
    assert runpy.run_path(str(script))["drawing"]() == script.with_suffix(".svg").read_text(encoding="utf-8")


def test_figures_were_found():
    assert {"stream.py", "path.py"} <= {script.name for script in SCRIPTS}
