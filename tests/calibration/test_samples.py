"""Which samples calibrate: n/k of each task, nested, by seed and task name, whatever the order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergeway.calibration.samples import Samples, check_samples, draw, shares
from mergeway.errors import OptionError


def samples(count: int = 50, task: str = "mnist", head: torch.Tensor | None = None) -> Samples:
    return Samples(task, {"x": torch.arange(count)}, torch.arange(count) % 3, head)


@given(st.integers(1, 300), st.integers(1, 300))
def test_shares_are_even_and_shrink(size, tasks):
    if size < tasks:
        with pytest.raises(OptionError, match=f"{size} calibration samples for {tasks} tasks"):
            shares(size, tasks)
        return
    given_out = shares(size, tasks)
    assert sum(given_out) == size
    assert max(given_out) - min(given_out) <= 1
    if tasks > 1:
        assert all(now <= before for now, before in zip(given_out, shares(size, tasks - 1), strict=False))


def test_draws_are_nested_and_distinct():
    large = draw(samples(), 40).inputs["x"].tolist()
    assert len(set(large)) == 40
    for count in (1, 7, 39):
        assert draw(samples(), count).inputs["x"].tolist() == large[:count]
    assert large != sorted(large)


def test_a_drawn_share_is_not_shuffled_again():
    once = draw(samples(), 40)
    assert draw(once, 10, seed=5).inputs["x"].tolist() == once.inputs["x"].tolist()[:10]


def test_rows_stay_together():
    drawn = draw(samples(), 20)
    assert drawn.labels.tolist() == [x % 3 for x in drawn.inputs["x"].tolist()]


def test_seed_and_task_decide():
    first = draw(samples(), 30).inputs["x"].tolist()
    assert draw(samples(), 30).inputs["x"].tolist() == first
    assert draw(samples(), 30, seed=1).inputs["x"].tolist() != first
    assert draw(samples(task="svhn"), 30).inputs["x"].tolist() != first


def test_a_small_task_gives_what_it_has():
    assert sorted(draw(samples(5), 40).inputs["x"].tolist()) == list(range(5))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (samples(0), "there are no samples"),
        (Samples("t", {"x": torch.arange(3)}, torch.tensor([0, 1])), "3 rows of 'x' for 2 labels"),
        (Samples("t", {"x": torch.arange(2)}, torch.tensor([0, -1])), "label -1 is out of range"),
        (
            Samples("t", {"x": torch.arange(2)}, torch.tensor([0, 4]), torch.zeros(3, 8)),
            "label 4 is out of range; the head has 3 classes, 0 to 2",
        ),
    ],
)
def test_unusable_samples(made, said):
    with pytest.raises(OptionError, match=f"here: {said}"):
        check_samples(made, "here")


def test_texts_of_like_length_are_padded_to_the_longest_of_them():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    made = Samples("t", {"input_ids": torch.arange(18).view(3, 6), "attention_mask": mask}, torch.tensor([4, 1, 2]))
    ordered = made.by_length()
    assert ordered.labels.tolist() == [1, 2, 4]
    assert ordered.trimmed().inputs["input_ids"].tolist() == [[6, 7, 8, 9], [12, 13, 14, 15], [0, 1, 2, 3]]
    assert ordered.rows(slice(2)).trimmed().inputs["attention_mask"].tolist() == [[1, 0], [1, 1]]
    # Token labels go with their tokens; padding in front of a text stays.
    tokens = Samples("t", made.inputs, torch.arange(18).view(3, 6)).rows(slice(1, 3)).trimmed()
    assert tokens.labels.tolist() == [[6, 7], [12, 13]]
    front = Samples("t", {"attention_mask": mask.flip(1)}, torch.zeros(3, dtype=torch.long))
    assert front.trimmed().inputs["attention_mask"].shape == (3, 6)
    pictures = Samples("t", {"images": torch.zeros(2, 6)}, torch.zeros(2, dtype=torch.long))
    assert pictures.by_length().trimmed() is pictures
