"""What is written survives a power cut at any moment: the old or the new, never neither and never half."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from disk import Disk, recorded

import mergeway as mw
from mergeway.core import files, stages
from mergeway.errors import CheckpointError


@pytest.fixture
def disks():
    """Closes what the recorders hold open."""
    held: list[Disk] = []
    yield held
    for disk in held:
        disk.close()


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_file_is_the_old_or_the_new(tmp_path, disks):
    root = tmp_path / "root"
    root.mkdir()
    (root / "notes.json").write_text("old")
    with recorded(root) as disk:
        disks.append(disk)
        files.replace_text(root / "notes.json", "new")
    found = [(cut, (made / "notes.json").read_text()) for cut, made in disk.cuts(tmp_path / "cuts")]
    assert {text for _, text in found} == {"old", "new"}
    assert {text for cut, text in found if cut == disk.last} == {"new"}
    calls = [c for c in disk.calls if "before" not in c]
    assert calls == ["start", "mkdir", "fsync", "rename", "rmdir", "fsync", "end"]


def test_the_disk_loses_a_file_that_was_renamed_and_never_flushed(tmp_path, disks):
    """The model of the disk finds the mistake that it is for."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "notes.json").write_text("old")
    with recorded(root) as disk:
        disks.append(disk)
        (root / "notes.new").write_text("new")
        os.rename(root / "notes.new", root / "notes.json")
    assert "" in {(made / "notes.json").read_text() for _, made in disk.cuts(tmp_path / "cuts")}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "aside"])
def test_a_staged_directory_replaces_another(tmp_path, disks, exchange):
    root, out = tmp_path / "root", tmp_path / "root" / "out"
    out.mkdir(parents=True)
    (out / "old.txt").write_text("old")
    with recorded(root, exchange) as disk:
        disks.append(disk)
        with stages.staged(out, replace=True) as stage:
            (stage / "heads").mkdir()
            (stage / "heads" / "new.txt").write_text("by a library that flushes nothing")
            (stage / "link").symlink_to("heads/new.txt")
    old, new = {"old.txt": b"old"}, content(out)
    assert sorted(new) == ["heads/new.txt", "link"]
    for cut, made in disk.cuts(tmp_path / "cuts"):
        if not exchange:
            stages.restore(made / "out")
        assert content(made / "out") in ([new] if cut == disk.last else [old, new]), disk.calls[: cut + 1]
    assert [p.name for p in root.iterdir()] == ["out"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "aside"])
def test_no_failure_ends_with_neither(tmp_path, monkeypatch, exchange):
    """Every rename and every flush fails once: the old directory is there, and nothing beside it."""
    out = tmp_path / "root" / "out"
    if not exchange:
        monkeypatch.setattr(stages, "_exchange", lambda one, other: False)
    failed = 0
    for number in range(100):
        shutil.rmtree(out.parent, ignore_errors=True)
        out.mkdir(parents=True)
        (out / "old.txt").write_text("old")
        with Failing(monkeypatch, number) as failing:
            problem = refused(out)
        if failing.failed:
            assert problem == f"{out}: cannot be written (Input/output error)"
        assert [p.name for p in out.parent.iterdir()] == ["out"], failing.calls
        assert content(out) == ({"old.txt": b"old"} if failing.failed else {"new.txt": b"new"}), failing.calls
        failed += failing.failed
        if not failing.failed:
            break
    assert failed == (3 if exchange else 6)


def refused(out: Path) -> str | None:
    try:
        with stages.staged(out, replace=True) as stage:
            (stage / "new.txt").write_text("new")
    except CheckpointError as problem:
        return str(problem)
    return None


class Failing:
    """The n-th call that changes or flushes a name says EIO."""

    def __init__(self, monkeypatch, number: int) -> None:
        self.number, self.calls, self.failed, self._patch = number, [], False, monkeypatch

    def __enter__(self) -> Failing:
        self._context = self._patch.context()
        patch = self._context.__enter__()
        for module, name in ((os, "rename"), (os, "fsync")):
            patch.setattr(module, name, self._count(name, getattr(module, name)))
        return self

    def _count(self, name, call):
        def counted(*args, **kwargs):
            self.calls.append(name)
            if len(self.calls) == self.number + 1:
                self.failed = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args, **kwargs)

        return counted

    def __exit__(self, *problem) -> None:
        self._context.__exit__(*problem)


def test_a_failed_file_leaves_the_old_one_and_nothing_beside(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(ZeroDivisionError), files.replaced(tmp_path / "a.txt") as new:
        new.write_text(f"half {1 / 0}")
    assert content(tmp_path) == {"a.txt": b"old"}


def test_errors_name_the_file_and_the_cause(tmp_path):
    for code, words in ((errno.ENOSPC, "no space left on the disk"), (errno.EIO, "cannot be written (Input/output")):
        with pytest.raises(CheckpointError, match=r"^model\.bin: ") as found, files.writing(Path("model.bin")):
            raise OSError(code, os.strerror(code))
        assert words in str(found.value)
    with pytest.raises(CheckpointError, match=r"^model\.bin: cannot be read \(Input/output error\)$"):  # noqa: SIM117
        with files.reading(Path("model.bin")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_two_directories_change_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "was").write_text(name)
    stages.swap(tmp_path / "a", tmp_path / "b")
    assert content(tmp_path) == {"a/was": b"b", "b/was": b"a"}


def test_an_add_with_data_survives_every_cut(vision, tmp_path, disks):
    """Whatever the journal names is whole: weights, state and calibration.parquet."""
    folder = Path(vision.path)
    trunk = mw.Trunk.create(tmp_path / "root" / "trunk", folder / "base", "ode", threads=1)
    task = {"data": str(folder / "data" / "ants.npz"), "head": folder / "heads" / "ants.safetensors"}
    with recorded(tmp_path / "root") as disk:
        disks.append(disk)
        trunk.add(folder / "experts" / "ants", **task)
    assert (tmp_path / "root" / "trunk" / "steps" / "000001" / "calibration.parquet").exists()
    for cut, made in disk.cuts(tmp_path / "cuts"):
        opened = mw.Trunk.open(made / "trunk", threads=1)
        assert opened.verify() == [], disk.calls[: cut + 1]
        assert len(opened.log()) in ([2] if cut == disk.last else [1, 2]), disk.calls[: cut + 1]


@pytest.mark.parametrize("force", [False, True], ids=["new", "replaced"])
def test_an_export_survives_every_cut(vision, tmp_path, disks, force):
    """The side files too: no config.json of 0 bytes."""
    folder = Path(vision.path)
    trunk = mw.Trunk.create(tmp_path / "trunk", folder / "base", "average", threads=1)
    trunk.add(folder / "experts" / "ants")
    out = tmp_path / "root" / "out"
    out.parent.mkdir()
    if force:
        trunk.export(out)
    old = content(out) if force else None
    trunk.add(folder / "experts" / "bees")
    with recorded(tmp_path / "root") as disk:
        disks.append(disk)
        trunk.export(out, dtype=torch.bfloat16, force=force)
    new = content(out)
    assert {"config.json", "README.md", "model.safetensors"} <= set(new)
    for cut, made in disk.cuts(tmp_path / "cuts"):
        found = content(made / "out") if (made / "out").exists() else None
        assert found in ([new] if cut == disk.last else [old, new]), disk.calls[: cut + 1]
