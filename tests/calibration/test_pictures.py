"""Pictures are decoded on every core, and the next batch while a model looks at the one before it."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from mergeway.calibration.pictures import decode_all, read_pictures
from mergeway.calibration.samples import Samples, read_ahead
from mergeway.errors import OptionError

SIDE = 8


def encoded(count: int) -> list[bytes]:
    draw, found = np.random.default_rng(0), []
    for _ in range(count):
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(file, "PNG")
        found.append(file.getvalue())
    return found


def test_many_pictures_stay_in_their_order(tmp_path):
    draw, files = np.random.default_rng(0), []
    wanted = [draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(40)]
    for number, data in enumerate(encoded(40)):
        files.append(tmp_path / f"{number}.png")
        files[-1].write_bytes(data)
    np.testing.assert_array_equal(decode_all("here", encoded(40), SIDE), wanted)
    np.testing.assert_array_equal(read_pictures(files, SIDE), wanted)
    assert decode_all("here", [], SIDE).shape == (0, SIDE, SIDE, 3)


def test_one_that_is_no_picture_is_told():
    pictures = encoded(9)
    pictures[5] = b"text"
    with pytest.raises(OptionError, match="here: holds something that is not an image"):
        decode_all("here", pictures, SIDE)


class Slow:
    """Rows that say when they are read."""

    def __init__(self, number: int, read: list[threading.Event]) -> None:
        self.number, self.read = number, read

    def __len__(self) -> int:
        return 1

    def load(self) -> torch.Tensor:
        self.read[self.number].set()
        return torch.full((1,), self.number)


def test_the_next_batch_is_read_while_one_is_looked_at():
    read = [threading.Event() for _ in range(4)]
    batches = [Samples("t", {"images": Slow(number, read)}, torch.zeros(1, dtype=torch.long)) for number in range(4)]
    seen = []
    for batch in read_ahead(batches):
        seen.append(int(batch.tensors["images"]))
        following = seen[-1] + 1
        assert following == len(read) or read[following].wait(30)
        assert not any(event.is_set() for event in read[following + 1 :])
    assert seen == [0, 1, 2, 3]
    assert [*read_ahead([])] == []
