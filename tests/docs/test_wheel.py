"""What a user gets: the built wheel in an environment of its own, without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST = 20_000_000  # bytes; the package index takes more, a newcomer's patience less


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT))
    (built,) = out.glob("*.whl")
    return built


def run(*command: str, cwd: Path | None = None) -> str:
    hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "leaked" not in done.stderr  # what newer versions of torch say of objects that are never freed
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.stat().st_size < LARGEST
    assert {name.split("/")[0].removesuffix(".dist-info").split("-")[0] for name in names} == {"mergeway"}
    assert any(name.endswith("suites/digits/suite.json") for name in names)
    assert any(name.startswith("mergeway/bench/report/page/") for name in names)
    assert "mergeway/py.typed" in names  # type checkers read our annotations


@pytest.mark.slow
@pytest.mark.parametrize("versions", ["pinned", "current"])
def test_the_wheel_runs_the_demo_by_itself(wheel, tmp_path, versions):
    """With the versions of `constraints.txt`, and with whatever `pip install` finds today."""
    home = tmp_path / "environment"
    run(sys.executable, "-m", "venv", str(home))
    pins = ["--constraint", str(ROOT / "constraints.txt")] if versions == "pinned" else []
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *pins]
    run(*pip, "torch")
    run(*pip, str(wheel))
    shown = run(str(home / "bin" / "mergeway"), "demo", "--quick", "--out", "demo", cwd=tmp_path)
    assert "steer" in shown and "report.html" in shown
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000
