"""What Linux has and macOS has not: a fold without it gives the same bytes."""

from __future__ import annotations

import os

import pytest

import mergeway as mw
from mergeway.core.pool import usable_cores
from mergeway.fold.merge import merge_into

LINUX_ONLY = ("sched_getaffinity", "posix_fallocate", "posix_fadvise")


@pytest.fixture
def elsewhere(monkeypatch):
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name, raising=False)


def test_a_merge_and_a_trunk_need_nothing_of_linux(stream, tmp_path, request):
    s = stream(2)

    def fold(out):
        out.mkdir()
        merge_into(out / "merged", s.base, s.arrivals, "opcm")
        trunk = mw.Trunk.create(out / "trunk", base=s.base, rule="opcm")
        for arrival in s.arrivals:
            trunk.add(arrival)
        return (out / "merged" / "model.safetensors").read_bytes(), trunk.log()[-1].result

    here = fold(tmp_path / "here")
    request.getfixturevalue("elsewhere")
    assert fold(tmp_path / "elsewhere") == here


def test_cores_are_counted_where_the_system_does_not_say_which_are_ours(elsewhere):
    assert usable_cores() == (os.cpu_count() or 1)
