"""Every command that writes, one row each: what it finds, the command line, and what may differ from one run to the next.

A new command that writes is one more row. All files a row writes lie below the folder that it is given; what it reads is
shared and lies elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiny
import torch
from fake_hub import FakeHub
from safetensors.torch import save_file
from shared import draw_tensors

import mergeway as mw
from mergeway.bench.report import trunk_data, write_page


class Inputs:
    """What commands read: a stream of plain files, and a suite of pictures."""

    def __init__(self, folder: Path) -> None:
        first = draw_tensors(0)
        self.plain = []
        for k in range(4):
            change = draw_tensors(k) if k else {n: torch.zeros_like(t) for n, t in first.items()}
            self.plain.append(folder / f"plain{k}.safetensors")
            save_file({n: t + 0.05 * change[n] for n, t in first.items()}, self.plain[-1])
        self.moved = folder / "moved.safetensors"
        shutil.copyfile(self.plain[0], self.moved)
        self.suite = tiny.vision_suite(folder / "suite", train=8, test=4)
        self.experts = [self.suite / "experts" / task for task in tiny.TASKS]
        self.optimiser = _optimiser(folder / "optimizer.pt", self.suite / "base")
        self.hub: FakeHub | None = None  # whoever needs one puts it here

    def data(self, k: int) -> list:
        """The data of the k-th task on a command line."""
        task = tiny.TASKS[k]
        return ["--data", self.suite / "data" / f"{task}.npz", "--head", self.suite / "heads" / f"{task}.safetensors"]


def _optimiser(file: Path, model_of: Path) -> Path:
    """A saved optimiser of a model."""
    from transformers import CLIPVisionModelWithProjection

    model = CLIPVisionModelWithProjection.from_pretrained(model_of)
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    optimiser = torch.optim.Adam(model.parameters())
    optimiser.step()
    torch.save(optimiser.state_dict(), file)
    return file


Start = Callable[[Inputs, Path], object]
Words = Callable[[Inputs, Path], list]


@dataclass(frozen=True)
class Row:
    """A command that writes."""

    name: str
    start: Start  # what is there before, in an empty folder
    words: Words
    again: Words | None = None  # how to repeat it after a fault; by default by the same words
    resumes: bool = False  # what a failure leaves is what it goes on from
    bit_by_bit: bool = False  # what it does to one thing it has done, whatever becomes of the next
    environment: Callable[[Inputs, Path], dict[str, str]] = lambda inputs, folder: {}
    beside: Callable[[Inputs], dict[str, bytes]] = lambda inputs: {}  # what it changes that is not in the folder
    reset: Callable[[Inputs], object] = lambda inputs: None  # brings that back to what it was before
    varies: Callable[[str, bytes], bytes] = lambda path, content: content  # without what the clock decides

    def __str__(self) -> str:
        return self.name


def _trunk(rule: str = "average", adds: int = 1, keep: int = 1) -> Start:
    def start(inputs: Inputs, folder: Path) -> mw.Trunk:
        trunk = mw.Trunk.create(folder / "trunk", inputs.plain[0], rule, keep=keep, threads=1)
        for arrival in inputs.plain[1 : adds + 1]:
            trunk.add(arrival)
        return trunk

    return start


def _pictures(rule: str, adds: int, out: str | None = None, keep: int = 2, **options: object) -> Start:
    """A trunk of pictures; `out` holds an older export."""

    def start(inputs: Inputs, folder: Path) -> None:
        trunk = mw.Trunk.create(folder / "trunk", inputs.suite / "base", rule, keep=keep, threads=1, **options)
        for k in range(adds):
            task = tiny.TASKS[k]
            needed = {"data": str(inputs.data(k)[1]), "head": inputs.data(k)[3]} if mw.rules.RULES[rule].needs else {}
            trunk.add(inputs.experts[k], task=task, **needed)
            if out and k == 0:
                trunk.export(folder / out)

    return start


def _merged(inputs: Inputs, folder: Path) -> None:
    mw.merge_into(folder / "out", inputs.suite / "base", inputs.experts[:1], "average")


def _nothing(inputs: Inputs, folder: Path) -> None: ...


def _report(inputs: Inputs, folder: Path) -> None:
    _trunk()(inputs, folder)
    trunk = mw.Trunk.open(folder / "trunk")
    write_page(trunk_data(trunk), folder / "page.html")
    trunk.add(inputs.plain[2])


def _tagged(inputs: Inputs, folder: Path) -> None:
    _trunk(adds=2, keep=2)(inputs, folder).tag(1, "first")


def _with_temporary(inputs: Inputs, folder: Path) -> None:
    _pictures("average", 2)(inputs, folder)
    (folder / "tmp").mkdir()


def _hub_of(inputs: Inputs, folder: Path) -> dict[str, str]:
    assert inputs.hub is not None
    return {**inputs.hub.words(), "TMPDIR": str(folder / "tmp")}


def _older_on_hub(inputs: Inputs) -> None:
    assert inputs.hub is not None
    inputs.hub.repos = {"me/model": {"model-00001-of-00002.safetensors": b"an older shard", "notes.txt": b"mine"}}


def _on_hub(inputs: Inputs) -> dict[str, bytes]:
    assert inputs.hub is not None
    held = inputs.hub.repos["me/model"]
    return {f"hub/{name}": tensors(c) if name == "model.safetensors" else c for name, c in held.items()}


def _bench(*more: str) -> Words:
    return lambda i, f: [
        "bench", i.suite, "--rules", "average,opcm", "--orders", 1, "--samples", 4, "--out", f / "run", *more,
    ]  # fmt: skip


def _without_seconds(path: str, content: bytes) -> bytes:
    """Timings vary, but there must be one for each fold."""
    return re.sub(rb'"seconds": *[0-9.e-]+', b"", content) if "timings" in path else content


ROWS = [
    Row("init", _nothing, lambda i, f: ["init", f / "trunk", "--base", i.plain[0], "--rule", "average"]),
    Row(
        "init --embed-base",
        _nothing,
        lambda i, f: ["init", f / "trunk", "--base", i.suite / "base", "--rule", "opcm", "--embed-base"],
    ),
    Row("add", _trunk(), lambda i, f: ["add", f / "trunk", i.plain[2], "--threads", 1]),
    Row(
        "add with data",
        _pictures("steer", 1, keep=1, steps=2),
        lambda i, f: ["add", f / "trunk", i.experts[1], *i.data(1), "--copies", 1, "--threads", 1],
    ),
    Row("remove", _trunk(adds=2), lambda i, f: ["remove", f / "trunk", "plain1", "--from", i.plain[1], "--threads", 1]),
    Row("relocate", _trunk(), lambda i, f: ["relocate", f / "trunk", "--base", i.moved]),
    Row("rollback", _trunk(adds=2, keep=2), lambda i, f: ["rollback", f / "trunk", 1]),
    Row("align", _pictures("average", 2), lambda i, f: ["align", f / "trunk", *i.data(1)]),
    Row("export", _pictures("average", 1), lambda i, f: ["export", f / "trunk", f / "out"]),
    Row(
        "export --force",
        _pictures("average", 2, "out"),
        lambda i, f: ["export", f / "trunk", f / "out", "--force", "--shard-size", "10KB"],
    ),
    Row("export --lora", _pictures("average", 1), lambda i, f: ["export", f / "trunk", f / "out", "--lora", 2]),
    Row("tag", _trunk(adds=2, keep=2), lambda i, f: ["tag", f / "trunk", 1, "good"]),
    Row("tag --remove", _tagged, lambda i, f: ["tag", f / "trunk", "--remove", "first"]),
    Row("prune", _trunk(adds=3, keep=3), lambda i, f: ["prune", f / "trunk", "--keep", 1], bit_by_bit=True),
    Row("replay", _trunk(adds=2), lambda i, f: ["replay", f / "trunk", f / "out", "--rule", "opcm"]),
    Row(
        "push",
        _with_temporary,
        lambda i, f: ["push", f / "trunk", "me/model"],
        environment=_hub_of,
        beside=_on_hub,
        reset=_older_on_hub,
    ),
    Row("merge", _nothing, lambda i, f: ["merge", *i.plain[:3], "--out", f / "out", "--threads", 1]),
    Row(
        "merge --force",
        _merged,
        lambda i, f: ["merge", i.suite / "base", *i.experts[:2], "--out", f / "out", "--force", "--threads", 1],
    ),
    Row("report", _report, lambda i, f: ["report", f / "trunk", "--out", f / "page.html"]),
    Row(
        "moments",
        _nothing,
        lambda i, f: ["moments", i.optimiser, "--model", i.suite / "base", "--out", f / "moments.safetensors"],
    ),
    Row(
        "finetune",
        _nothing,
        lambda i, f: ["finetune", i.suite, "ants", "--out", f / "out", "--steps", 2, "--batch", 4, "--save-every", 1],
        resumes=True,
    ),
    Row(
        "suites split",
        _nothing,
        lambda i, f: [
            "suites",
            "split",
            i.suite / "data" / f"{tiny.TASKS[0]}.npz",
            "--base",
            i.suite / "base",
            "--out",
            f / "out",
            "--tasks",
            2,
        ],
    ),
    Row("bench", _nothing, _bench(), _bench("--resume"), resumes=True, varies=_without_seconds),
]

# Commands that write nothing, or nothing but their answer.
LOOKING = {"log", "show", "memory", "verify", "evaluate", "path", "rules", "diff"}
# Commands that are no row, and why.
ELSEWHERE = {
    "demo": "a bench and a report of it",
}


def tensors(content: bytes) -> bytes:
    """A safetensors file with its header in order; the library writes what it is told about a file in any."""
    length = 8 + int.from_bytes(content[:8], "little")
    return json.dumps(json.loads(content[8:length]), sort_keys=True).encode() + content[length:]


def journal(content: bytes) -> bytes:
    """The whole records of a journal without what the clock decides."""
    rows = [json.loads(line) for line in content.split(b"\n")[:-1]]
    clock = ("time", "hash", "previous")
    return json.dumps([{k: v for k, v in row.items() if k not in clock} for row in rows]).encode()
