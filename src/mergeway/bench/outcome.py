"""What a run is, and what it gives, as types."""

from __future__ import annotations

from typing import TypedDict


class _Protocol(TypedDict):
    suite: str
    rules: list[str]
    lengths: list[int]
    orders: int
    utilities: str
    samples: int
    version: str


class Description(_Protocol, total=False):
    """What a run is, as run.json says it."""

    copies: int
    written: bool
    tests: int
    autocast: bool


class RunRow(TypedDict):
    """What a rule reaches on streams of one length: mean and standard deviation over the orders, in percent."""

    rule: str
    tasks: int
    acc: float
    acc_std: float
    bwt: float
    bwt_std: float
    forgetting: float
    forgetting_std: float
    fwt: float | None
    fwt_std: float | None
    gap: float
    gap_std: float
    loss: float | None
    loss_gap: float | None
    gradients: float
    seconds: float


class RunJson(TypedDict):
    """A run as `bench --json` prints it."""

    suite: str
    base: float
    experts: float
    base_loss: float | None
    experts_loss: float | None
    rows: list[RunRow]
