"""The site builds without a warning and asks for nothing from outside."""

from __future__ import annotations

import re
import subprocess
import sys

import pages
import pytest


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the site needs the packages of '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=pages.ROOT,
        env=pages.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    for path in pages.DOCS.rglob("*.md"):
        inside = path.relative_to(pages.DOCS).with_suffix("").as_posix().removesuffix("index").rstrip("/")
        assert f'href="{inside or "."}{"/" if inside else ""}"' in home, f"{path.name} is not in mkdocs.yml"


def test_nothing_is_loaded_from_outside(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]+)\"", text)
        loaded += re.findall(r"<link[^>]*rel=\"(?:stylesheet|preconnect|preload|icon)\"[^>]*href=\"([^\"]+)\"", text)
        loaded += re.findall(r"<link[^>]*href=\"([^\"]+)\"[^>]*rel=\"(?:stylesheet|preconnect|preload|icon)\"", text)
        assert loaded
        assert not [address for address in loaded if re.match(r"(?:https?:)?//", address)], page
