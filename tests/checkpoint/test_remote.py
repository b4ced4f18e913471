"""Bases, arrivals and trunks by URL: fetched once, as they are, and never written."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

import mergeway as mw
from mergeway.checkpoint import remote
from mergeway.checkpoint.resolve import url_of
from mergeway.errors import CheckpointError, TrunkError


@pytest.fixture
def shelf(monkeypatch, tmp_path):
    """A store in memory, empty before and after, an empty cache, and every file that is fetched from it."""
    monkeypatch.setenv("MERGEWAY_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    taken = []
    get = MemoryFileSystem.get_file

    def counted(self, address, out, *rest, **more):
        taken.append(address.rpartition("/")[2])
        return get(self, address, out, *rest, **more)

    monkeypatch.setattr(MemoryFileSystem, "get_file", counted)
    yield taken
    store.store.clear()


def upload(local: Path, url: str) -> None:
    store = fsspec.filesystem("memory")
    for path in sorted(local.rglob("*")) if local.is_dir() else [local]:
        if path.is_file():
            inside = f"{url}/{path.relative_to(local)}" if local.is_dir() else url
            store.pipe_file(inside, path.read_bytes())


def test_what_is_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert url_of("s3://bucket/model") == url_of(Path("s3://bucket/model")) == "s3://bucket/model"
    assert url_of("file:///a/b") == url_of(Path("file:///a/b")) == "file:///a/b"
    for ref in ("org/name", "org/name@main", "/a/b", "C:/x", "self:64", {"w": 1}):
        assert url_of(ref) is None
    (tmp_path / "odd:" / "name").mkdir(parents=True)
    assert url_of("odd:/name") is None


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_stream_by_url_gives_the_same_bits(scheme, shelf, stream, tmp_path, call):
    files = stream(3)
    named = {}
    for path in (files.base, *files.arrivals):
        named[path] = f"memory://models/{path.name}" if scheme == "memory" else path.absolute().as_uri()
        if scheme == "memory":
            upload(path, named[path])
    here = mw.Trunk.create(tmp_path / "here", files.base, "opcm")
    call("init", tmp_path / "there", "--base", named[files.base], "--rule", "opcm").ok()
    for path in files.arrivals:
        here.add(path)
        call("add", tmp_path / "there", named[path]).ok()
    there = mw.Trunk.open(tmp_path / "there")
    assert [(r.task, r.digest, r.result) for r in there.log()] == [(r.task, r.digest, r.result) for r in here.log()]
    assert [r.source for r in there.log()[1:]] == [named[path] for path in files.arrivals]
    assert there.verify() == []
    call(
        "merge", named[files.base], *(named[p] for p in files.arrivals), "--rule", "opcm", "--out", tmp_path / "m"
    ).ok()
    assert len(shelf) == len(set(shelf)) or scheme == "file"  # no file is fetched twice


def test_a_model_that_changed_is_fetched_again_and_refused_as_a_base(shelf, stream, tmp_path):
    files = stream(2)
    upload(files.base, "memory://m/base")
    trunk = mw.Trunk.create(tmp_path / "trunk", "memory://m/base", "average")
    trunk.add(files.arrivals[0])
    upload(files.arrivals[1], "memory://m/base")
    with pytest.raises(TrunkError, match="has changed since 'init'"):
        mw.Trunk.open(trunk.path).add(files.arrivals[1])


def test_a_trunk_on_a_remote_is_read(shelf, stream, tmp_path, call):
    files = stream(3)
    trunk = mw.Trunk.create(tmp_path / "trunk", files.base, "average", keep=9)
    trunk.add(files.arrivals[0], "ants")
    upload(trunk.path, "memory://t/trunk")
    far = mw.Trunk.open("memory://t/trunk")
    assert far.log() == trunk.log() and far.verify() == []
    assert "intact" in call("verify", "memory://t/trunk").ok().out
    assert call("log", "memory://t/trunk", "--json").json() == call("log", trunk.path, "--json").json()
    call("export", "memory://t/trunk", tmp_path / "far").ok()
    call("export", trunk.path, tmp_path / "near").ok()
    assert (tmp_path / "far/model.safetensors").read_bytes() == (tmp_path / "near/model.safetensors").read_bytes()
    call("report", "memory://t/trunk", "--out", tmp_path / "far.html").ok()
    assert "<h1>Trunk trunk</h1>" in (tmp_path / "far.html").read_text()
    # After another fold only what is new is fetched.
    shelf.clear()
    trunk.add(files.arrivals[1], "bees")
    for name in ("journal.jsonl", "head"):
        upload(trunk.path / name, f"memory://t/trunk/{name}")
    upload(trunk.path / "steps" / "000002", "memory://t/trunk/steps/000002")
    assert mw.Trunk.open("memory://t/trunk").log()[-1].task == "bees"
    assert sorted(shelf) == sorted(["journal.jsonl", "head", *os.listdir(trunk.path / "steps" / "000002")])


@pytest.mark.parametrize(
    "words",
    [
        ("add", "URL", "ARRIVAL"),
        ("rollback", "URL", "0"),
        ("tag", "URL", "1", "stable"),
        ("relocate", "URL", "--base", "BASE"),
        ("remove", "URL", "ants", "--from", "ARRIVAL"),
        ("prune", "URL"),
        ("init", "memory://t/new", "--base", "BASE", "--rule", "average"),
    ],
)
def test_a_trunk_on_a_remote_is_not_written(words, shelf, stream, tmp_path, call):
    files = stream(2)
    trunk = mw.Trunk.create(tmp_path / "trunk", files.base, "average", keep=9)
    trunk.add(files.arrivals[0], "ants")
    upload(trunk.path, "memory://t/trunk")
    before = {name: bytes(file.getvalue()) for name, file in fsspec.filesystem("memory").store.items()}
    known = {"URL": "memory://t/trunk", "ARRIVAL": files.arrivals[0], "BASE": files.base}
    line = call(*(known.get(word, word) for word in words)).mistake()
    assert "is only read" in line and "copy it to one, change it there, and copy it back" in line
    assert {name: bytes(file.getvalue()) for name, file in fsspec.filesystem("memory").store.items()} == before


def test_what_changes_on_the_way_is_refused(shelf, stream, tmp_path, monkeypatch):
    files = stream(1)
    upload(files.base, "memory://m/base")
    get = MemoryFileSystem.get_file

    def busy(self, address, out, *rest, **more):
        get(self, address, out, *rest, **more)
        self.pipe_file(address, b"something else")

    monkeypatch.setattr(MemoryFileSystem, "get_file", busy)
    with pytest.raises(CheckpointError, match="was changed while it was fetched; run again"):
        mw.Trunk.create(tmp_path / "trunk", "memory://m/base")
    assert not (tmp_path / "trunk").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://nowhere/at-all", "there is nothing there"),
        ("nostore://x/y", "Protocol not known"),
        ("gs://bucket/model", "install that package"),
    ],
)
def test_mistakes_are_one_line(url, said, shelf, tmp_path, call):
    if url.startswith("gs:") and find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    line = call("init", tmp_path / "trunk", "--base", url, "--rule", "average").mistake()
    assert url in line and said in line and not (tmp_path / "trunk").exists()
    assert url in call("log", url).mistake()


def test_nothing_leads_out_of_a_view(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(
        MemoryFileSystem, "find", lambda *_, **__: {"/m/base/../x.json": {"name": "/m/base/../x.json", "size": 1}}
    )
    with pytest.raises(CheckpointError, match="leads out of its directory"):
        remote.fetched("memory://m/base")


def test_s3(stream, tmp_path, monkeypatch):
    """The same on S3 as moto plays it, where moto and s3fs are installed."""
    pytest.importorskip("s3fs", reason="S3 needs s3fs")
    server = pytest.importorskip("moto.server", reason="S3 is played by moto").ThreadedMotoServer(port=0)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MERGEWAY_CACHE", str(tmp_path / "cache"))
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        store = fsspec.filesystem("s3")
        store.mkdir("bucket")
        files = stream(2)
        for path in (files.base, *files.arrivals):
            store.put(str(path), f"bucket/{path.name}", recursive=path.is_dir())
        trunk = mw.Trunk.create(tmp_path / "trunk", f"s3://bucket/{files.base.name}", "average")
        trunk.add(f"s3://bucket/{files.arrivals[0].name}", "ants")
        store.put(str(trunk.path), "bucket/trunk", recursive=True)
        far = mw.Trunk.open("s3://bucket/trunk")
        assert far.log() == trunk.log() and far.verify() == []
        far.export(tmp_path / "out")
        local = mw.merge(files.base, files.arrivals[:1])
        assert {n: t.tolist() for n, t in load_file(tmp_path / "out/model.safetensors").items()} == {
            n: t.tolist() for n, t in local.items()
        }
        with pytest.raises(TrunkError, match="is only read"):
            far.add(files.arrivals[1])
    finally:
        server.stop()
