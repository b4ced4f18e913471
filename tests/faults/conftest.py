"""What the tests of faults share: things to read, and the process that injects."""

from __future__ import annotations

from collections.abc import Iterator

import fake_hub
import pytest
from commands import Inputs
from injector import Injector


@pytest.fixture(scope="package")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inputs]:
    made = Inputs(tmp_path_factory.mktemp("inputs"))
    with fake_hub.fake_hub() as made.hub:
        yield made


@pytest.fixture(scope="package")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Injector]:
    made = Injector(tmp_path_factory.mktemp("injector"))
    yield made
    made.close()
