"""What a project people join has: its workflow runs what CI runs, and its papers agree with the package."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import mergeway

ROOT = Path(__file__).parents[1]


def test_the_workflow_checks_every_supported_python():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    run = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    made = [word for line in run if line.startswith("make ") for word in line.split()[1:]]
    assert made == ["lint", "test", "docs"] and set(made) <= set(targets)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mergeway.__version__
    assert citation["license"] == "Apache-2.0" and citation["authors"] and citation["cff-version"] == "1.2.0"
