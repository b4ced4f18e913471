"""A disk that answers EIO, a file that cannot be locked or mapped: one line that names the file, and an unharmed trunk."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import mmap
import os
import shutil
from pathlib import Path

import pytest

import mergeway as mw

CALLS = [
    *((os, name) for name in ("open", "pwrite", "posix_fallocate", "fsync", "rename", "mkdir", "stat", "scandir")),
    *((module, "open") for module in (builtins, io)),
    (os, "listdir"),
    (fcntl, "flock"),
    (mmap, "mmap"),
]


class Fault:
    """The n-th call of a function says EIO, of those on files below a folder."""

    def __init__(self, monkeypatch, module, name: str, number: int, folder: Path) -> None:
        self.failed, self._left, self._folder = False, number, str(folder)
        self._patch = monkeypatch.context()
        self._module, self._name, self._call = module, name, getattr(module, name)

    def __call__(self, *args, **kwargs):
        if not self.failed and self._ours(args[0] if args else "."):
            self._left -= 1
            if self._left < 0:
                self.failed = True
                named = args[:1] if args and not isinstance(args[0], int) else ()
                raise OSError(errno.EIO, os.strerror(errno.EIO), *named)
        return self._call(*args, **kwargs)

    def _ours(self, file) -> bool:
        if isinstance(file, int):
            file = os.readlink(f"/proc/self/fd/{file}")
        return isinstance(file, str | os.PathLike) and os.fspath(file).startswith(self._folder)

    def __enter__(self) -> Fault:
        patch = self._patch.__enter__()
        # `mmap` is a class, and torch asks what it is.
        patch.setattr(self._module, self._name, lambda *args, **kwargs: self(*args, **kwargs))
        return self

    def __exit__(self, *problem) -> None:
        self._patch.__exit__(*problem)


@pytest.mark.parametrize(("module", "name"), CALLS, ids=[f"{m.__name__}.{n}" for m, n in CALLS])
def test_an_input_output_error_is_one_line(stream, tmp_path, call, monkeypatch, module, name):
    """Every call of `add` once: exit 2, the file named, the trunk as it was, or the commit that the message tells of."""
    s = stream(2)
    start, trunk = tmp_path / "start", tmp_path / "trunk"
    mw.Trunk.create(start, s.base, "average").add(s.arrivals[0])
    points = 0
    for number in range(400):
        shutil.rmtree(trunk, ignore_errors=True)
        shutil.copytree(start, trunk)
        with Fault(monkeypatch, module, name, number, tmp_path) as fault:
            done = call("add", trunk, s.arrivals[1], "--threads", 1, "--quiet")
        if not fault.failed:
            break
        points += 1
        steps = len(mw.Trunk.open(trunk).log()) - 1
        assert mw.Trunk.open(trunk).verify() == []
        if done.code == 0:  # what is not needed for the commit
            assert steps == 2
            continue
        line = done.mistake()
        assert "bug" not in line and str(tmp_path) in line and "Input/output error" in line, line
        assert (steps == 2) == ("is committed" in line), line
        assert steps == 1 or "nothing was changed" not in line
        left = {p.name for p in (trunk / "steps").iterdir()}
        assert left == ({"000001"} if steps == 1 else {"000001", "000002"}), line
    assert points, "no such call was made"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(stream, tmp_path, call, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    s = stream(1)
    mw.Trunk.create(tmp_path / "trunk", s.base, "average")
    monkeypatch.setattr(fcntl, "flock", flock)
    line = call("add", tmp_path / "trunk", s.arrivals[0]).mistake()
    assert f"{tmp_path / 'trunk' / 'lock'}: cannot be locked" in line and "flock" in line
