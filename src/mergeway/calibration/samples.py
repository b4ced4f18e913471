"""Calibration samples: a few examples of each seen task, drawn by seed, the same whatever the rule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mergeway.errors import OptionError
from mergeway.model.inputs import Head, Inputs, in_memory

DEFAULT_SIZE = 1024
MINIBATCH = 128  # rows of a minibatch drawn by seed, over all tasks
MASKED = -100  # the label of a token that is not judged, as torch's cross-entropy has it
UNKNOWN = -1  # the label of an example that nobody has labelled
JUDGE_EVERY = 16  # one row in so many judges what the others have taught


@dataclass(frozen=True)
class Samples:
    """Examples of one task: inputs as the model takes them, row by row, and the task's frozen head if it has one.

    A head is one matrix of class vectors, or the named tensors that stand in for the model's own classifier. `answers` are the
    arrival's own logits, [rows, 1 + copies, classes]: for the example, then for each of its copies (see `copies`), and `own` the
    classes that it speaks of, [classes], where they are not all. Those to
    tokens, [rows, 1 + copies, places, 2k + 1], are log-probabilities of the k likeliest tokens and of k drawn ones, both in
    `tops`, and of all but the likeliest together.
    """

    task: str
    inputs: Inputs
    labels: Tensor
    head: Head = None
    shuffled: bool = False
    answers: Tensor | None = None
    tops: Tensor | None = None
    own: Tensor | None = None
    # How the arrival wrote them itself, if it did, and the digest of the one that answered.
    written: str | None = None
    asked: str | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: slice | Tensor) -> Samples:
        """Some of the examples."""
        answers = None if self.answers is None else self.answers[index]
        tops = None if self.tops is None else self.tops[index]
        inputs = {k: v[index] for k, v in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels[index], answers=answers, tops=tops)

    def among(self, classes: Sequence[int]) -> Samples:
        """The same examples, to be told apart among these rows of the head only."""
        if not isinstance(self.head, Tensor):
            raise OptionError(f"the classes of '{self.task}' cannot be told apart alone: its head is not one matrix")
        index = torch.full((len(self.head),), UNKNOWN)
        index[list(classes)] = torch.arange(len(classes))
        return replace(self, head=self.head[list(classes)], labels=index[self.labels])

    @property
    def labelled(self) -> bool:
        """Whether somebody has labelled them; tokens are their own labels."""
        return self.labels.ndim > 1 or not bool((self.labels == UNKNOWN).all())

    @property
    def documents(self) -> bool:
        """Whether every token is predicted from those before it."""
        return self.labels.ndim > 1

    @property
    def mask(self) -> Tensor | None:
        """Which tokens of each text are no padding; None for anything but texts."""
        mask = self.inputs.get("attention_mask")
        return None if mask is None else in_memory(mask)

    def by_length(self) -> Samples:
        """The same texts, short ones first, so that those of a batch need little padding; anything else as it is."""
        mask = self.mask
        return self if mask is None else self.rows(mask.sum(-1).argsort(stable=True))

    def trimmed(self) -> Samples:
        """The same texts without the columns that are padding in all of them."""
        mask = self.mask
        if mask is None:
            return self
        used = int(mask.any(0).nonzero().max()) + 1 if bool(mask.any()) else 1
        if used == mask.shape[1]:
            return self
        inputs = {k: in_memory(v)[:, :used] for k, v in self.inputs.items()}
        if self.labels.ndim == 1:
            return replace(self, inputs=inputs)
        # An answer for every token.
        answers, tops = (None if t is None else t[:, :, :used] for t in (self.answers, self.tops))
        return replace(self, inputs=inputs, labels=self.labels[:, :used], answers=answers, tops=tops)

    def loaded(self) -> Samples:
        """The same examples with all inputs in memory; those of a large dataset are read only when looked at."""
        return replace(self, inputs=self.tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The inputs in memory."""
        return {k: in_memory(v) for k, v in self.inputs.items()}


def read_ahead(batches: Iterable[Samples]) -> Iterator[Samples]:
    """Each of these in memory; while one is looked at, the next is read."""
    with ThreadPoolExecutor(1) as reader:
        waiting: Future[Samples] | None = None
        for batch in batches:
            following = reader.submit(batch.loaded)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()


def check_samples(samples: Samples, where: str, classes: int | None = None) -> None:
    """Refuse data that no loss can be computed on."""
    if len(samples) == 0:
        raise OptionError(f"{where}: there are no samples")
    for name, rows in samples.inputs.items():
        if len(rows) != len(samples):
            raise OptionError(f"{where}: {len(rows)} rows of '{name}' for {len(samples)} labels")
    count = len(samples.head) if isinstance(samples.head, Tensor) else classes
    if samples.answers is not None and len(samples.answers) != len(samples):
        raise OptionError(f"{where}: answers to {len(samples.answers)} samples for {len(samples)} labels")
    if samples.answers is not None and count is not None and samples.answers.shape[-1] != count:
        raise OptionError(
            f"{where}: the arrival answered for {samples.answers.shape[-1]} classes, but the head has {count}; a task keeps the head it came with"
        )
    if samples.labels.ndim > 1:  # tokens: each is a class, and masked ones are negative
        _check_tops(samples, where)
        if not bool((samples.labels[:, 1:] != MASKED).any()):
            raise OptionError(f"{where}: every token is masked, so there is nothing to predict")
        return
    if not samples.labelled:
        return
    low, high = int(samples.labels.min()), int(samples.labels.max())
    if low < 0 or (count is not None and high >= count):
        bad = low if low < 0 else high
        raise OptionError(
            f"{where}: label {bad} is out of range; the head has {count} classes, 0 to {(count or 1) - 1}"
        )


def _check_tops(samples: Samples, where: str) -> None:
    if samples.answers is None or samples.tops is None:
        return
    *asked, places, bins = samples.answers.shape
    if samples.tops.shape != (*asked, places, bins - 1):
        raise OptionError(
            f"{where}: answers {list(samples.answers.shape)} for tokens {list(samples.tops.shape)}; there must be one bin more than tokens"
        )
    if places != samples.labels.shape[1]:
        raise OptionError(f"{where}: answers at {places} places for texts of {samples.labels.shape[1]} tokens")


def require_labels(samples: Samples, what: str) -> Samples:
    """The samples, where somebody has labelled them; `what` cannot do without."""
    if not samples.labelled:
        raise OptionError(f"the samples of '{samples.task}' have no labels, and {what}; give labelled data")
    return samples


def shares(size: int, tasks: int, weights: Sequence[float] | None = None) -> list[int]:
    """n samples over k tasks: n/k each, the first ones taking what is left over; with weights by utility, at least one each."""
    if tasks and size < tasks:
        raise OptionError(f"{size} calibration samples for {tasks} tasks: each task needs at least one")
    if weights is None:
        return [size // tasks + (i < size % tasks) for i in range(tasks)]
    exact = [size * w / sum(weights) for w in weights]
    counts = [max(1, int(x)) for x in exact]
    while sum(counts) > size:  # what the smallest were lifted to one by is taken from the largest
        counts[counts.index(max(counts))] -= 1
    for i in sorted(range(tasks), key=lambda i: counts[i] - exact[i])[: size - sum(counts)]:
        counts[i] += 1
    return counts


def draw(samples: Samples, count: int, seed: int = 0) -> Samples:
    """The first `count` of the task's shuffled samples: a smaller draw is always part of a larger one."""
    if not samples.shuffled:
        key = hashlib.sha256(f"{seed}:{samples.task}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        samples = replace(samples.rows(torch.randperm(len(samples), generator=generator)), shuffled=True)
    return samples.rows(slice(count))


def judges(row: int) -> bool:
    """Whether a row is never taught, in no fold, so that it can judge: the second of each sixteen, as two rows are the fewest."""
    return row % JUDGE_EVERY == 1


def hold_out(samples: Samples, share: float) -> tuple[Samples, Samples]:
    """Samples parted by chance, but always the same: those to fold with, and a share to judge by."""
    count = min(len(samples) - 1, max(1, round(share * len(samples))))
    if count < 1:
        raise OptionError(f"--holdout: there are {len(samples)} samples of '{samples.task}'; it takes two at least")
    return samples.rows(slice(count, None)), samples.rows(slice(count))
