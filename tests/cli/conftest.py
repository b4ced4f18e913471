"""What the tests of the command line share."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

ROOM = 1 << 30  # bytes that a command may take more than the tests have
SECONDS = 60


@pytest.fixture
def bounded(call):
    """The command line with an end to its memory and its time."""

    def limited(*words: object):
        before = resource.getrlimit(resource.RLIMIT_DATA)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resource.setrlimit(resource.RLIMIT_DATA, (int(status["VmData"].split()[0]) * 1024 + ROOM, before[1]))
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{words[0]} goes on and on"))
        signal.alarm(SECONDS)
        try:
            return call(*words)
        finally:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_DATA, before)

    return limited
