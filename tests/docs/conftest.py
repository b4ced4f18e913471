from __future__ import annotations

import os
from pathlib import Path

import pages
import pytest
import torch
from filelock import FileLock

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def stream(tmp_path_factory) -> Path:
    """The stream that the pages start from, made once for all test processes."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with FileLock(shared / "docs-stream.lock"):
        folder = shared / "docs-stream"
        if not (folder / "eurosat-lora" / "adapter_config.json").exists():
            pages.make_stream(folder)
    return folder
