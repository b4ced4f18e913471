"""Runs commands with a fault at a chosen system call: one process imports mergeway once and forks a child for each trial."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import importlib
import io
import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROWS, NAME = 20_000, 232  # as in inject.c
ROW = struct.Struct(f"i{NAME}s")
MODES = {"count": 0, "once": 1, "no more writes": 2, "short": 3, "kill": 4, "torn": 5, "no more changes": 6}
# What a fault is called -> its mode in inject.c, and the error it answers with.
FAULTS = {
    "ENOSPC": ("no more writes", errno.ENOSPC),
    "EIO": ("once", errno.EIO),
    "EINTR": ("once", errno.EINTR),
    "short write": ("short", 0),
    "kill": ("kill", 0),
    "torn write": ("torn", 0),
    "EROFS": ("no more changes", errno.EROFS),  # a file system that turns read-only stays so
}
ONLY_WRITES = ("short write", "torn write")
NAMES = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 6: "lstat", 9: "mmap", 17: "pread64", 18: "pwrite64",
    20: "writev", 40: "sendfile", 73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate",
    82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink", 88: "symlink", 90: "chmod",
    91: "fchmod", 217: "getdents64", 257: "openat", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat",
    264: "renameat", 265: "linkat", 266: "symlinkat", 268: "fchmodat", 280: "utimensat", 285: "fallocate",
    296: "pwritev", 316: "renameat2", 326: "copy_file_range", 328: "pwritev2", 332: "statx",
}  # fmt: skip
WRITES = ("write", "pwrite64", "writev", "sendfile", "pwritev")
READS = ("read", "pread64", "getdents64", "mmap", "stat", "lstat", "newfstatat", "statx", "open", "openat")
NOT_CHANGES = ("close", "flock")
REMOVALS = ("unlink", "unlinkat", "rmdir")
SECONDS = 300  # after which a child has hung


@dataclass(frozen=True)
class Call:
    """A system call that touched a file below the root."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}({self.path})"


@dataclass(frozen=True)
class Ended:
    """How a child came to its end; `code` is negative for a signal."""

    code: int
    out: str
    err: str
    calls: list[Call]
    fired: bool

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def why_not() -> str | None:
    """Why no fault can be injected here; None where it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the injector is written for Linux on x86-64"
    if shutil.which("cc") is None:
        return "there is no C compiler (cc) to build the injector with"
    try:
        filters = "Seccomp" in Path("/proc/self/status").read_text()
    except OSError:
        filters = False
    return None if filters else "this kernel has no seccomp filters"


def build(folder: Path) -> Path:
    """The library that injects."""
    library = folder / "inject.so"
    source = Path(__file__).with_name("inject.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    return library


class Injector:
    """The process that forks the commands; it is this file, run as a script."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._report = folder / "report"
        library = build(folder)
        self._process = subprocess.Popen(
            [sys.executable, __file__, library], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        words: list,
        root: Path,
        fault: str | None = None,
        at: int = 0,
        reads: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        """A command line, with a fault at the call of this number among those that touch a file below the root."""
        mode, code = FAULTS[fault] if fault else ("count", 0)
        with open(self._report, "wb") as file:
            file.truncate(8 + ROWS * ROW.size)
        out, err = self._folder / "stdout", self._folder / "stderr"
        trial = [str(root), str(self._report), at, MODES[mode], code, int(reads)]
        self._process.stdin.write(
            json.dumps([[str(w) for w in words], trial, str(out), str(err), dict(environment or {})]) + "\n"
        )
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())
        return Ended(code, _text(out), _text(err), *self._read())

    def _read(self) -> tuple[list[Call], bool]:
        with open(self._report, "rb") as file:
            count, fired = struct.unpack("ii", file.read(8))
            rows = [ROW.unpack(file.read(ROW.size)) for _ in range(min(count, ROWS))]
        assert count <= ROWS, "more calls than the report has room for"
        return [Call(NAMES[n], p.split(b"\0")[0].decode(errors="replace")) for n, p in rows], fired > 0

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _serve(library: str) -> None:
    """Forks a child for each line of stdin, and answers how it ended."""
    import torch

    torch.set_num_threads(1)
    import typer.main

    from mergeway.cli import main

    # To read all commands' options anew takes longer than most of the commands do.
    typer.main.get_command = functools.cache(typer.main.get_command)
    with contextlib.redirect_stdout(io.StringIO()):
        main(["--version"])
    inject = ctypes.CDLL(library)
    imported = Path(library).with_name("imported")
    for line in sys.stdin:
        words, trial, out, err, environment = json.loads(line)
        child = os.fork()
        if child == 0:
            _set(environment)
            _command(inject, main, words, trial, out, err, imported)
        code = _wait(child)
        if trial[3] == MODES["count"]:
            _import(imported)
        print(json.dumps(code), flush=True)


def _set(environment: dict[str, str]) -> None:
    """What libraries have read of the environment when they were imported, they read again."""
    os.environ.update(environment)
    tempfile.tempdir = environment.get("TMPDIR", tempfile.tempdir)
    hub = sys.modules.get("huggingface_hub.constants")
    if hub and "HF_HUB_OFFLINE" in environment:
        hub.HF_HUB_OFFLINE = environment["HF_HUB_OFFLINE"] == "1"


def _import(listing: Path) -> None:
    """Import what a child has imported, so that the next one need not."""
    for name in listing.read_text().split():
        if name not in sys.modules and name != "__main__":
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _command(inject: ctypes.CDLL, main, words: list[str], trial: list, out: str, err: str, imported: Path) -> None:
    code = 99
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        root, report, at, mode, error, reads = trial
        armed = inject.arm(root.encode(), report.encode(), at, mode, error, reads)
        if armed:
            raise OSError(-armed, os.strerror(-armed), "seccomp")
        code = main(words)
        sys.stdout.flush()
        if mode == MODES["count"]:
            imported.write_text("\n".join(sys.modules))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    until = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGABRT)
        time.sleep(0.002)


if __name__ == "__main__":
    _serve(sys.argv[1])
