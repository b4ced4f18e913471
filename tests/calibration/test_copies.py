"""Copies follow from the task, the row and the number, and from rows before it; pictures and texts each in their way."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergeway.calibration import copies
from mergeway.calibration.copies import copy_rows

SIDE = 28
PAD, FIRST, LAST = 3, 1, 2


def pictures(count: int = 12, side: int = SIDE, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"images": torch.randint(0, 256, (count, side, side, 3), generator=generator, dtype=torch.uint8)}


def texts(count: int = 12, longest: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """[FIRST, words of this row only, LAST, padding]; a word tells the row it is from."""
    rng = np.random.default_rng(seed)
    ids, mask = np.full((count, longest), PAD), np.zeros((count, longest), int)
    for row in range(count):
        length = int(rng.integers(3, longest + 1))
        ids[row, :length] = [FIRST, *(100 * (row + 1) + k for k in range(length - 2)), LAST]
        mask[row, :length] = 1
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def every(inputs, count: int, numbers=(1, 2, 5), seed: str = "task") -> dict[str, torch.Tensor]:
    """Some copies of the first `count` rows."""
    rows = [row for row in range(count) for _ in numbers]
    return copy_rows(inputs, rows, list(numbers) * count, seed)


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


BOTH = pytest.mark.parametrize("make", [pictures, texts])


# --- what a copy depends on -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("count", [1, 5, 11])
def test_what_follows_changes_no_copy(make, count):
    """The memory shrinks to its first rows, and answers that were kept still belong to the copies."""
    whole = make()
    first = {n: t[:count] for n, t in whole.items()}
    other = {n: torch.cat([t[:count], make(seed=9)[n]]) for n, t in whole.items()}
    wanted = every(first, count)
    assert same(every(whole, count), wanted)
    assert same(every(other, count), wanted)


def test_padding_is_known_from_rows_before_only():
    inputs = texts()
    inputs["attention_mask"][:4] = 1
    inputs["input_ids"][:4] = inputs["input_ids"][:4].clamp(min=5)
    first = {n: t[:4] for n, t in inputs.items()}
    assert same(every(inputs, 4), every(first, 4))


@BOTH
def test_each_copy_stands_alone(make):
    """In any company and order the same copy."""
    inputs = make()
    rows, numbers = [7, 3, 7, 11, 0], [1, 4, 2, 1, 3]
    together = copy_rows(inputs, rows, numbers, "task")
    for place, (row, number) in enumerate(zip(rows, numbers, strict=True)):
        alone = copy_rows(inputs, [row], [number], "task")
        assert all(torch.equal(alone[n][0], together[n][place]) for n in together)
    assert same(copy_rows(inputs, rows, numbers, "task"), together)
    for other in (copy_rows(inputs, rows, [n + 1 for n in numbers], "task"), copy_rows(inputs, rows, numbers, "else")):
        assert not same(other, together)


@BOTH
def test_inputs_stay_as_they_are(make):
    inputs = make()
    before = {n: t.clone() for n, t in inputs.items()}
    made = every(inputs, 12)
    for name, tensor in made.items():
        assert tensor.dtype == before[name].dtype
        assert tensor.shape == (36, *before[name].shape[1:])
        tensor.zero_()
    assert same(inputs, before)


def test_other_inputs_come_back_as_they_are():
    inputs = {"x": torch.arange(12.0).view(6, 2)}
    assert torch.equal(copy_rows(inputs, [4, 1], [1, 2], "task")["x"], inputs["x"][[4, 1]])


# --- pictures ---------------------------------------------------------------------------------------------------------


def key_of(task: str) -> int:
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "little")


def seen_through(image: np.ndarray, move: np.ndarray) -> np.ndarray:
    """One picture read at A·x + b for the middle x of every pixel, between the four pixels around it, by hand."""
    height, width, _ = image.shape
    seen = np.zeros(image.shape)
    for line in range(height):
        for column in range(width):
            x, y = move @ [(2 * column + 1) / width - 1, (2 * line + 1) / height - 1, 1.0]
            right = np.clip(((x + 1) * width - 1) / 2, 0, width - 1)
            down = np.clip(((y + 1) * height - 1) / 2, 0, height - 1)
            for near_line in {int(np.floor(down)), int(np.ceil(down))}:
                for near_column in {int(np.floor(right)), int(np.ceil(right))}:
                    near = (1 - abs(down - near_line)) * (1 - abs(right - near_column))
                    seen[line, column] += near * image[near_line, near_column]
    return seen


@pytest.mark.parametrize(("height", "width"), [(12, 12), (7, 11)])
def test_a_picture_is_the_sum_that_its_change_says(height, width):
    """Against a sampling written out pixel by pixel."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, height, width, 3), generator=generator, dtype=torch.uint8)
    plain = images.numpy().astype(np.float64)
    for row in range(5):
        for number in (1, 2):
            change = copies._change((key_of("task"), row, number))
            own, other = (
                seen_through(plain[which], move)
                for which, move in ((row, change.own_move), (change.other, change.other_move))
            )
            wanted = change.share * own + (1 - change.share) * other
            made = copy_rows({"images": images}, [row], [number], "task")["images"][0].numpy()
            assert np.abs(made - wanted).max() <= 0.5 + 1e-2


def partners(row: int) -> set[int]:
    """Rows before this one of its kind, the second of each sixteen being those that judge; the first of a kind has only itself."""
    return {other for other in range(row) if (other % 16 == 1) == (row % 16 == 1)} or {row}


def test_changes_are_within_their_bounds():
    for row in (0, 1, 2, 9, 17, 20):
        found = [copies._change((5, row, number)) for number in range(1, 200)]
        moves = np.array([[c.own_move, c.other_move] for c in found]) - np.eye(2, 3)
        assert 0.2 < np.abs(moves[..., :2]).max() <= 0.25
        assert 0.13 < np.abs(moves[..., 2]).max() <= 1 / 7
        assert np.abs(moves.mean((0, 1))).max() < 0.03  # nothing is favoured
        shares = [c.share for c in found]
        assert 0.6 <= min(shares) < 0.62 and 0.98 < max(shares) <= 1.0
        assert {c.other for c in found} == partners(row)


# --- texts ------------------------------------------------------------------------------------------------------------


def words_of(made, place: int) -> list[int]:
    return made["input_ids"][place][made["attention_mask"][place].bool()].tolist()


def test_texts_keep_their_ends_and_borrow_from_rows_before():
    inputs = texts()
    mask = inputs["attention_mask"].bool()
    borrowed = dropped = 0
    for row in range(2, 12):  # the first of each kind borrows from itself
        own = inputs["input_ids"][row][mask[row]].tolist()
        made = copy_rows(inputs, [row] * 40, list(range(1, 41)), "task")
        for place in range(40):
            words = words_of(made, place)
            assert words[0] == FIRST and words[-1] == LAST and len(words) <= 16
            body = words[1:-1]
            first, rest = [w for w in body if w // 100 == row + 1], [w for w in body if w // 100 != row + 1]
            # What is its own is in its order, and what is not comes after it, in one piece, from one row before.
            assert body == first + rest and set(first) <= set(own) and first == sorted(first)
            assert len(first) >= min(1, len(own) - 2)
            others = {w // 100 - 1 for w in rest}
            assert len(others) <= 1 and others <= partners(row)
            assert rest == list(range(rest[0], rest[0] + len(rest))) if rest else True
            borrowed += bool(rest)
            dropped += len(first) < len(own) - 2
    assert borrowed > 60 and dropped > 60


def test_masks_say_where_the_words_are():
    made = every(texts(), 12, range(1, 20))
    for ids, mask in zip(made["input_ids"], made["attention_mask"], strict=True):
        length = int(mask.sum())
        assert mask.tolist() == [1] * length + [0] * (16 - length)
        assert PAD not in ids[:length].tolist()
        assert set(ids[length:].tolist()) <= {PAD, 0}


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_text_of_its_ends_only_is_its_own_copy(length):
    inputs = texts(3)
    inputs["attention_mask"][1] = 0
    inputs["attention_mask"][1, :length] = 1
    made = copy_rows(inputs, [1], [1], "task")
    assert words_of(made, 0) == inputs["input_ids"][1, :length].tolist()


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 3), st.text(max_size=5))
def test_texts_of_any_length_have_copies(lengths, number, seed):
    ids, mask = torch.full((len(lengths), 12), PAD), torch.zeros(len(lengths), 12, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length], mask[row, :length] = torch.arange(length) + 10 * (row + 1), 1
    rows = list(range(len(lengths)))
    made = copy_rows({"input_ids": ids, "attention_mask": mask}, rows, [number] * len(rows), seed)
    for row, length in enumerate(lengths):
        words = words_of(made, row)
        assert (len(words) == length) if length < 3 else (3 <= len(words) <= 12)
