"""Several processes that work as one: who does which part, and how all of them agree. One process alone is a team of one.

`torchrun` starts the processes; every one of them runs the same command. The lead alone takes locks, makes and names files
and commits; tensors are taken from a common queue, so that a faster rank does more of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from mergeway.errors import MergewayError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class RankLost(MergewayError):
    """Another process of the team ended or cannot be reached."""


class Team:
    """One process alone."""

    rank = 0
    count = 1

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in the order of the ranks."""
        return [value]

    def from_lead(self, make: Callable[[], T]) -> T:
        """What the lead makes, on every rank; its error is everybody's."""
        return make()

    def add_up(self, values: list[float]) -> list[float]:
        """Sums over the ranks."""
        return values

    def add_in_place(self, tensor: Tensor) -> None:
        """The sum of a tensor over the ranks, in its place and with the same bits on all of them."""

    def pool(self, workers: Executor, threads: int) -> Executor:
        """The workers of all ranks as one pool."""
        return workers


ALONE = Team()


class TorchTeam(Team):
    """The processes that torchrun started."""

    def __init__(self) -> None:
        import torch
        from torch import distributed
        from torch.distributed.rendezvous import rendezvous

        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"
        with _lost_rank_named():
            store, rank, count = next(rendezvous("env://"))
            # A rank that dies is seen at once by its closed connection; a long wait is one for a lock.
            distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(days=1))
        self.rank, self.count, self.store = rank, count, store
        self.distributed = distributed

    def gather(self, value: T) -> list[T]:
        values = [value] * self.count
        with _lost_rank_named():
            self.distributed.all_gather_object(values, value)
        return values

    def from_lead(self, make: Callable[[], T]) -> T:
        outcome: list[tuple[list[T], Exception | None]] = [([], None)]
        if self.lead:
            try:
                outcome = [([make()], None)]
            except Exception as problem:
                outcome = [([], problem)]
        with _lost_rank_named():
            self.distributed.broadcast_object_list(outcome, src=0)
        found, problem = outcome[0]
        if problem is not None:
            raise problem
        return found[0]

    def add_up(self, values: list[float]) -> list[float]:
        import torch

        total = torch.tensor(values, dtype=torch.float64)
        with _lost_rank_named():
            self.distributed.all_reduce(total)
        return total.tolist()

    def add_in_place(self, tensor: Tensor) -> None:
        with _lost_rank_named():
            self.distributed.all_reduce(tensor)

    def pool(self, workers: Executor, threads: int) -> Executor:
        return _CommonPool(self, workers, threads)


class _CommonPool(Executor):
    """Maps over a queue that all ranks take from; every rank gets all results, in order."""

    def __init__(self, team: TorchTeam, workers: Executor, threads: int) -> None:
        self._team, self._workers, self._threads = team, workers, threads

    def map(self, fn: Callable[..., T], *iterables: Iterable[object], **_: object) -> Iterator[T]:
        items = list(zip(*iterables, strict=True))
        queue = self._team.from_lead(lambda: f"mergeway-{os.urandom(8).hex()}")
        done: list[tuple[int, T]] = []

        def work() -> None:
            while True:
                with _lost_rank_named():
                    number = self._team.store.add(queue, 1) - 1
                if number >= len(items):
                    return
                done.append((number, fn(*items[number])))

        problem: Exception | None = None
        for worker in [self._workers.submit(work) for _ in range(self._threads)]:
            try:
                worker.result()
            except Exception as found:
                problem = problem or found
        outcomes = self._team.gather((done, problem))
        if failed := [found for _, found in outcomes if found is not None]:
            raise failed[0]
        results = {number: result for mine, _ in outcomes for number, result in mine}
        return iter([results[number] for number in range(len(items))])


_current: Team = ALONE


def team() -> Team:
    """The processes that work on this command together."""
    return _current


def started_by_torchrun() -> bool:
    """Whether this process is one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextlib.contextmanager
def joined() -> Iterator[Team]:
    """Be one of the processes that torchrun started, until the block ends."""
    global _current
    before = signal.signal(signal.SIGTERM, _stop)
    started = TorchTeam()
    _current = started
    try:
        yield started
    finally:
        _current = ALONE
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(RuntimeError, ValueError):
            started.distributed.destroy_process_group()


def _stop(*_: object) -> None:
    """What torchrun asks of the others when one rank has failed: end at once, without waiting for threads at work.

    What was staged is swept away by whoever writes next; only a commit changes anything.
    """
    line = (
        "error: another rank of this job failed, so torchrun ended this one; nothing was changed, start the job again\n"
    )
    os.write(2, line.encode())
    os._exit(2)


@contextlib.contextmanager
def _lost_rank_named() -> Iterator[None]:
    """Turn the network's error about a lost rank into one clear line."""
    try:
        yield
    except (RuntimeError, ConnectionError) as problem:
        words = " ".join(str(problem).split())
        raise RankLost(
            f"another rank of this job ended or cannot be reached; nothing was changed, start the job again ({words[-160:]})"
        ) from None


def own_rows(length: int, rank: int, count: int) -> slice:
    """The rows of a tensor that a rank holds when it is cut along its first axis, as `fully_shard` cuts it."""
    chunk = -(-length // count)
    return slice(min(rank * chunk, length), min((rank + 1) * chunk, length))


def cut(tensor: Tensor, team: Team) -> Tensor:
    """This rank's rows of a tensor; a single number belongs to the lead."""
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    return rows[own_rows(len(rows), team.rank, team.count)]


def offset(shape: tuple[int, ...], team: Team) -> int:
    """Where this rank's rows begin in the flattened tensor."""
    if not shape:
        return 0
    width = math.prod(shape[1:])
    return own_rows(shape[0], team.rank, team.count).start * width
