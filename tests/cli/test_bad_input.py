"""Mistakes: each gives exit code 2 and one line that names what is wrong, and changes nothing on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from shared import SHAPES, draw_tensors, listing

import mergeway as mw


class Box:
    """A place to make mistakes in: a base, two arrivals, a trunk that holds both, and an output that is not there yet."""

    def __init__(self, here: Path, shared: Path) -> None:
        self.here = here
        self.base = shared / "base.safetensors"
        self.arrival = shared / "one.safetensors"
        self.other = shared / "other.safetensors"
        self.trunk = here / "trunk"
        self.out = here / "out"

    def merge(self, arrival: Any = None, *more: Any, base: Any = None) -> list[Any]:
        return ["merge", base or self.base, arrival or self.arrival, *more, "--out", self.out]

    def add(self, arrival: Any = None, *more: Any) -> list[Any]:
        return ["add", self.trunk, arrival or self.other, *more]

    def raw(self, data: bytes, name: str = "bad.safetensors") -> Path:
        path = self.here / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return path

    def tensors(self, change: dict[str, torch.Tensor], *gone: str, name: str = "bad.safetensors") -> Path:
        """The arrival with some tensors changed, some left out."""
        tensors = {n: t for n, t in (draw_tensors(1) | change).items() if n not in gone}
        return self.raw(save(tensors), name)

    def header(self, header: Any, data: bytes = bytes(8), length: int | None = None) -> Path:
        """A file with this header, as text or as what becomes JSON."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return self.raw((len(text) if length is None else length).to_bytes(8, "little") + text + data)

    def directory(self, files: dict[str, Any], name: str = "model") -> Path:
        """A directory of files given as text, as bytes or as tensors."""
        folder = self.here / name
        folder.mkdir()
        for file, content in files.items():
            if content and isinstance(content, dict) and all(isinstance(v, torch.Tensor) for v in content.values()):
                save_file(content, folder / file)
            elif isinstance(content, bytes):
                (folder / file).write_bytes(content)
            else:
                (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    def shards(self, weight_map: Any, files: dict[str, Any] | None = None) -> Path:
        halves = list(draw_tensors(1).items())
        parts = {"a.safetensors": dict(halves[:3]), "b.safetensors": dict(halves[3:])} if files is None else files
        return self.directory({INDEX: {"weight_map": weight_map}, **parts})

    def lora(self, config: dict[str, Any], factors: dict[str, torch.Tensor] | None = None) -> Path:
        """An adapter of the square matrix, with parts of its config replaced."""
        right = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
        made = {f"base_model.model.layer.square.lora_{s}.weight": torch.ones(SQUARE[s]) for s in "AB"}
        folder = self.directory({"adapter_config.json": right | config})
        if factors is None or factors:
            save_file(made if factors is None else factors, folder / "adapter_model.safetensors")
        return folder

    def edit(self, file: str, change: Callable[[str], str]) -> Path:
        """Change a file of the trunk."""
        path = self.trunk / file
        text = path.read_text()
        assert change(text) != text
        path.write_text(change(text))
        return self.trunk


INDEX = "model.safetensors.index.json"
SQUARE = {"A": (2, 6), "B": (6, 2)}
MAP = {n: "a.safetensors" if k < 3 else "b.safetensors" for k, n in enumerate(draw_tensors(1))}
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NAN, INF = float("nan"), float("inf")

Case = tuple[Callable[[Box], list[Any]], str]

FILES: dict[str, Case] = {
    "truncated": (lambda b: b.merge(b.raw(b.arrival.read_bytes()[:-7])), "not a readable safetensors file"),
    "truncated-header": (lambda b: b.merge(b.raw(b.arrival.read_bytes()[:50])), "not a readable safetensors"),
    "header-length-absurd": (lambda b: b.merge(b.header({"a": F32}, length=2**62)), "not a readable safetensors"),
    "header-length-past-end": (lambda b: b.merge(b.header({"a": F32}, length=999)), "not a readable safetensors"),
    "header-length-zero": (lambda b: b.merge(b.header({"a": F32}, length=0)), "not a readable safetensors"),
    "overlapping": (
        lambda b: b.merge(b.header({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12))),
        "not a readable safetensors",
    ),
    "offsets-past-end": (lambda b: b.merge(b.header({"a": F32}, b"")), "not a readable safetensors"),
    "offsets-reversed": (lambda b: b.merge(b.header({"a": {**F32, "data_offsets": [8, 0]}})), "not a readable"),
    "offsets-negative": (lambda b: b.merge(b.header({"a": {**F32, "data_offsets": [-8, 0]}})), "not a readable"),
    "hole": (lambda b: b.merge(b.header({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12))), "not a readable"),
    "trailing-bytes": (lambda b: b.merge(b.raw(b.arrival.read_bytes() + b"more")), "not a readable safetensors"),
    "duplicate-key": (
        lambda b: b.merge(b.header(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2))),
        "twice",
    ),
    "header-not-json": (lambda b: b.merge(b.header(b"{not json}")), "not a readable safetensors"),
    "header-a-list": (lambda b: b.merge(b.header([])), "not a readable safetensors"),
    "header-not-utf8": (lambda b: b.merge(b.header(b'{"\xff\xfe":1}')), "not a readable safetensors"),
    "header-deep": (lambda b: b.merge(b.header(b'{"a":' + b"[" * 90000 + b"]" * 90000 + b"}")), "not a readable"),
    "no-header": (lambda b: b.merge(b.raw(b"abc")), "not a readable safetensors"),
    "empty-file": (lambda b: b.merge(b.raw(b"")), "not a readable safetensors"),
    "noise": (lambda b: b.merge(b.raw(bytes(range(256)) * 9)), "not a readable safetensors"),
    "shape-against-bytes": (lambda b: b.merge(b.header({"a": {**F32, "shape": [3]}})), "not a readable safetensors"),
    "shape-overflow": (lambda b: b.merge(b.header({"a": {**F32, "shape": [2**40, 2**40]}})), "not a readable"),
    "dtype-unknown": (lambda b: b.merge(b.header({"a": {**F32, "dtype": "F7"}})), "not a readable safetensors"),
    "dtype-unsupported": (lambda b: b.merge(b.header({"a": {**F32, "dtype": "C64", "shape": [1]}})), "dtype C64"),
    "nameless-tensor": (lambda b: b.merge(b.header({"": F32})), "without a name"),
    "no-tensors": (lambda b: b.merge(b.header({}, b"")), "holds no tensors"),
    "text": (lambda b: b.merge(b.raw(b"# A model card, not a model\n", "README.md")), "not a readable safetensors"),
    "truncated-base": (lambda b: b.merge(base=b.raw(b.base.read_bytes()[:-7])), "not a readable safetensors"),
    "truncated-to-trunk": (lambda b: b.add(b.raw(b.other.read_bytes()[:-7])), "not a readable safetensors"),
}

VALUES: dict[str, Case] = {
    "nan": (lambda b: b.merge(b.tensors({"layer.bias": torch.full((6,), NAN)})), "'layer.bias' holds 6 values"),
    "one-nan": (
        lambda b: b.add(
            b.tensors({"conv.weight": torch.ones(3, 2, 3, 3).index_put_((torch.tensor(1),) * 4, torch.tensor(NAN))})
        ),
        "'conv.weight' holds 1 values",
    ),
    "inf": (lambda b: b.merge(b.tensors({"layer.bias": torch.full((6,), INF)})), "NaN or infinite"),
    "minus-inf-in-half": (lambda b: b.add(b.tensors({"layer.bias": torch.full((6,), -INF).half()})), "NaN or infinite"),
    "nan-in-the-base": (lambda b: b.merge(base=b.tensors({"logit_scale": torch.tensor(NAN)})), "'logit_scale' holds 1"),
    "overflow": (
        lambda b: b.merge(b.tensors({"layer.bias": torch.full((6,), 1e300, dtype=torch.float64)})),
        "does not fit into",
    ),
    "missing": (lambda b: b.merge(b.tensors({}, "layer.bias")), "1 tensor is missing: 'layer.bias'"),
    "extra": (lambda b: b.add(b.tensors({"head.weight": torch.ones(2, 6)})), "unknown to the base: 'head.weight'"),
    "missing-and-extra": (
        lambda b: b.merge(b.tensors({"x": torch.ones(2)}, "layer.bias")),
        "is missing: 'layer.bias'; 1",
    ),
    "reshaped": (lambda b: b.merge(b.tensors({"layer.wide.weight": torch.ones(10, 4)})), "[10, 4] for [4, 10]"),
    "embedding-resized": (
        lambda b: b.merge(b.tensors({"embed_tokens.weight": torch.ones(13, 6)})),
        "vocabulary was resized from 11 to 13 rows",
    ),
    "many-differences": (
        lambda b: b.merge(b.tensors({f"x{k}": torch.full((2,), k + 1.0) for k in range(8)})),
        "8 tensors are unknown to the base: 'x0', 'x1', 'x2', 'x3', 'x4' and 3 more",
    ),
    "nothing-in-common": (lambda b: b.merge(b.raw(save({"z": torch.ones(2)}))), "is it a fine-tuned copy"),
    "integers-for-floats": (lambda b: b.merge(b.tensors({"layer.bias": torch.ones(6).int()})), "missing: 'layer.bias'"),
    "floats-for-integers": (
        lambda b: b.merge(
            b.tensors({"ids": torch.ones(3)}), base=b.tensors({"ids": torch.arange(3)}, name="b.safetensors")
        ),
        "'ids'",
    ),
    "float8": (lambda b: b.add(b.tensors({"layer.bias": torch.ones(6).to(torch.float8_e4m3fn)})), "F8_E4M3 on F32"),
    "float8-base": (
        lambda b: b.merge(base=b.tensors({"layer.bias": torch.ones(6).to(torch.float8_e5m2)})),
        "quantised",
    ),
    "base-of-integers": (lambda b: b.merge(base=b.raw(save({"ids": torch.arange(3)}))), "not a model"),
}

DIRECTORIES: dict[str, Case] = {
    "empty": (lambda b: b.merge(b.directory({})), "not a model directory"),
    "no-weights": (lambda b: b.merge(b.directory({"config.json": {}})), "not a model directory"),
    "several-files": (
        lambda b: b.merge(b.directory({"x.safetensors": draw_tensors(1), "y.safetensors": draw_tensors(2)})),
        "no model.safetensors.index.json",
    ),
    "shard-above": (lambda b: b.merge(b.shards(dict.fromkeys(MAP, "../x"))), "'../x' lies outside"),
    "shard-above-hidden": (lambda b: b.merge(b.shards(dict.fromkeys(MAP, "a/../../x"))), "lies outside"),
    "shard-absolute": (lambda b: b.merge(b.shards(dict.fromkeys(MAP, "/etc/passwd"))), "lies outside"),
    "shard-missing": (
        lambda b: b.merge(b.shards(MAP | {"layer.bias": "c.safetensors"})),
        "c.safetensors: no such file",
    ),
    "shard-a-directory": (lambda b: b.merge(b.shards(MAP | {"layer.bias": "."})), "cannot be read"),
    "shard-not-a-name": (lambda b: b.merge(b.shards(MAP | {"layer.bias": 7})), "7: no such file"),
    "shard-truncated": (
        lambda b: b.merge(b.shards(dict.fromkeys(MAP, "a"), {"a": save(draw_tensors(1))[:-9]})),
        "not a readable safetensors",
    ),
    "index-names-more": (lambda b: b.merge(b.shards(MAP | {"z": "a.safetensors"})), "'z' is in no shard"),
    "index-names-less": (
        lambda b: b.merge(b.shards({n: f for n, f in MAP.items() if n != "layer.bias"})),
        "'layer.bias' is not in the index",
    ),
    "tensor-in-two-shards": (
        lambda b: b.merge(b.shards(MAP, {"a.safetensors": draw_tensors(1), "b.safetensors": draw_tensors(1)})),
        "is also in a.safetensors",
    ),
    "index-not-json": (lambda b: b.merge(b.directory({INDEX: "{"})), "not valid JSON"),
    "index-a-list": (lambda b: b.merge(b.directory({INDEX: "[]"})), "not an object"),
    "index-without-map": (lambda b: b.merge(b.directory({INDEX: {}})), "no weight_map"),
    "index-map-empty": (lambda b: b.merge(b.shards({})), "no weight_map"),
    "index-not-text": (lambda b: b.merge(b.directory({INDEX: b"\xff\xfe\x00"})), "not valid JSON"),
    "pickle-index-above": (
        lambda b: b.merge(
            b.directory({"pytorch_model.bin.index.json": {"weight_map": {"a": "../x.bin"}}}), "--allow-pickle"
        ),
        "lies outside",
    ),
    "pickle-index-odd": (
        lambda b: b.merge(b.directory({"pytorch_model.bin.index.json": {"weight_map": [1]}}), "--allow-pickle"),
        "weight_map",
    ),
    "pickle": (lambda b: b.merge(b.raw(b"\x80\x04.", "model.bin")), "is a pickle"),
    "pickle-directory": (lambda b: b.add(b.directory({"pytorch_model.bin": b"\x80\x04."})), "is a pickle"),
    "pickle-broken": (lambda b: b.merge(b.raw(b"junk", "model.pt"), "--allow-pickle"), "weights-only"),
    "pickle-of-no-tensors": (lambda b: b.merge(_pickled(b, [1, 2]), "--allow-pickle"), "dictionary of tensors"),
    "pickle-of-complex": (
        lambda b: b.merge(_pickled(b, {"a": torch.ones(2, dtype=torch.complex64)}), "--allow-pickle"),
        "safetensors cannot hold",
    ),
    "nowhere": (lambda b: b.merge(b.here / "nowhere.safetensors"), "no such file or directory"),
    "too-long-a-name": (lambda b: b.merge("x" * 5000), "no such file"),
    "a-device": (lambda b: b.merge("/dev/null"), "is a pipe, a socket or a device"),
    "hub-id-with-three-parts": (lambda b: b.merge("a/b/c"), "not a hub id"),
    "hub-id-with-dots": (lambda b: b.merge("acme/a..b"), "hub id"),
    "hub-id-with-a-bad-revision": (lambda b: b.merge("acme/a@"), "not a hub id"),
    "hub-id-unknown": (lambda b: b.merge("acme/unknown@v1"), "hf download acme/unknown --revision v1"),
    "hub-base-unknown": (
        lambda b: ["init", b.here / "new", "--base", "acme/unknown", "--rule", "average"],
        "hf download acme/unknown",
    ),
}


def _pickled(box: Box, value: Any) -> Path:
    torch.save(value, box.here / "model.pt")
    return box.here / "model.pt"


OPTIONS: dict[str, Case] = {
    "weights-negative": (lambda b: b.merge(None, "--weights", "-1"), "positive"),
    "weights-zero": (lambda b: b.merge(None, "--weights", "0"), "positive"),
    "weights-nan": (lambda b: b.merge(None, "--weights", "nan"), "finite"),
    "weights-inf": (lambda b: b.merge(None, "--weights", "inf"), "finite"),
    "weights-too-many": (lambda b: b.merge(None, "--weights", "1,2"), "2 given for 1"),
    "weights-too-few": (lambda b: b.merge(None, b.other, "--weights", "1"), "1 given for 2"),
    "weights-words": (lambda b: b.merge(None, "--weights", "one"), "expected numbers"),
    "weights-empty": (lambda b: b.merge(None, "--weights", ""), "expected numbers"),
    "weight-negative": (lambda b: b.add(None, "--weight", "-1"), "positive"),
    "weight-zero": (lambda b: b.add(None, "--weight", "0"), "positive"),
    "weight-nan": (lambda b: b.add(None, "--weight", "nan"), "finite"),
    "weight-inf": (lambda b: b.add(None, "--weight", "1e999"), "finite"),
    "weight-a-word": (lambda b: b.add(None, "--weight", "heavy"), "'--weight'"),
    "rule-unknown": (lambda b: b.merge(None, "--rule", "avrage"), "did you mean 'average'?"),
    "rule-far-off": (lambda b: b.merge(None, "--rule", "xyzzy"), "known: average"),
    "rule-unknown-to-init": (lambda b: _init(b, "--rule", "opmc"), "did you mean 'opcm'?"),
    "option-unknown": (lambda b: b.merge(None, "--rule", "opcm", "--set", "alhpa=1"), "did you mean 'alpha'?"),
    "option-of-another-rule": (lambda b: b.merge(None, "--set", "alpha=1"), "rule 'average' has no option 'alpha'"),
    "option-not-a-number": (lambda b: b.merge(None, "--rule", "opcm", "--set", "alpha=big"), "takes a number"),
    "option-not-whole": (lambda b: b.merge(None, "--rule", "dop", "--set", "steps=1.5"), "takes a whole number"),
    "option-nan": (lambda b: b.merge(None, "--rule", "opcm", "--set", "alpha=nan"), "finite"),
    "option-inf": (lambda b: b.merge(None, "--rule", "iso", "--set", "scaling=inf"), "finite"),
    "option-too-large": (lambda b: _init(b, "--rule", "opcm", "--set", "alpha=1.5"), "at most 1"),
    "option-too-small": (lambda b: _init(b, "--rule", "ties", "--set", "density=-0.1"), "at least 0"),
    "option-no-such-choice": (lambda b: _init(b, "--rule", "opcm", "--set", "norms=rew"), "raw or projected"),
    "option-empty": (lambda b: _init(b, "--rule", "opcm", "--set", "alpha="), "takes a number"),
    "regex": (lambda b: b.merge(None, "--rule", "opcm", "--set", "linear=("), "not a regular expression"),
    "regex-to-init": (lambda b: _init(b, "--rule", "iso", "--set", "linear=*a"), "not a regular expression"),
    "set-without-equals": (lambda b: b.merge(None, "--rule", "opcm", "--set", "alpha"), "expected KEY=VALUE"),
    "set-without-key": (lambda b: b.merge(None, "--rule", "opcm", "--set", "=1"), "expected KEY=VALUE"),
    "set-twice": (
        lambda b: b.merge(None, "--rule", "opcm", "--set", "alpha=1", "--set", "alpha=0"),
        "given twice",
    ),
    "shard-size-zero": (lambda b: b.merge(None, "--shard-size", "0"), "--shard-size"),
    "shard-size-apples": (lambda b: b.merge(None, "--shard-size", "5 apples"), "--shard-size"),
    "shard-size-negative": (lambda b: b.merge(None, "--shard-size", "-5GB"), "--shard-size"),
    "shard-size-endless": (lambda b: b.merge(None, "--shard-size", "9" * 400), "--shard-size"),
    "dtype-unknown": (lambda b: ["export", b.trunk, b.out, "--dtype", "floot16"], "did you mean 'float16'?"),
    "dtype-of-integers": (lambda b: ["export", b.trunk, b.out, "--dtype", "int8"], "known: bfloat16"),
    "threads-zero": (lambda b: b.merge(None, "--threads", "0"), "at least 1"),
    "threads-negative": (lambda b: b.add(None, "--threads", "-2"), "at least 1"),
    "threads-a-word": (lambda b: ["verify", b.trunk, "--threads", "many"], "'--threads'"),
    "keep-zero": (lambda b: _init(b, "--rule", "average", "--keep", "0"), "at least 1"),
    "keep-negative": (lambda b: _init(b, "--rule", "average", "--keep", "-1"), "at least 1"),
    "command-unknown": (lambda b: ["merg", b.base], "'merge'"),
    "command-far-off": (lambda b: ["frobnicate"], "frobnicate"),
    "command-missing": (lambda b: ["--quiet"], "command"),
    "flag-unknown": (lambda b: b.merge(None, "--wieghts", "1"), "--weights"),
    "argument-missing": (lambda b: ["merge", b.base, "--out", b.out], "ARRIVAL"),
    "out-missing": (lambda b: ["merge", b.base, b.arrival], "--out"),
    "value-missing": (lambda b: ["merge", b.base, b.arrival, "--out"], "--out"),
    "argument-too-many": (lambda b: ["verify", b.trunk, "again"], "again"),
    "argument-not-utf8": (lambda b: b.merge("caf\udce9.safetensors"), "not valid UTF-8"),
}


def _init(box: Box, *more: Any) -> list[Any]:
    return ["init", box.here / "new", "--base", box.base, *more]


def _occupied(box: Box) -> list[Any]:
    box.directory({"model.safetensors": draw_tensors(1)}, "out")
    return box.merge()


OUTPUTS: dict[str, Case] = {
    "out-exists": (_occupied, "--force"),
    "out-is-a-file": (lambda b: ["export", b.trunk, b.raw(b"", "file")], "not a directory"),
    "out-below-a-file": (
        lambda b: ["merge", b.base, b.arrival, "--out", b.raw(b"", "file") / "out"],
        "cannot be written",
    ),
    "out-is-a-trunk": (lambda b: ["merge", b.base, b.arrival, "--out", b.trunk, "--force"], "model directory"),
    "out-is-not-a-model": (
        lambda b: ["export", b.trunk, b.directory({"notes.txt": "mine"}), "--force"],
        "does not look like a model",
    ),
    "out-holds-the-base": (lambda b: ["merge", _home(b), b.arrival, "--out", _home(b).parent, "--force"], "made from"),
    "out-name-too-long": (lambda b: ["merge", b.base, b.arrival, "--out", b.here / ("x" * 300)], "cannot be written"),
}


def _home(box: Box) -> Path:
    if not (box.here / "home").exists():
        box.directory({"base.safetensors": draw_tensors(0)}, "home")
    return box.here / "home" / "base.safetensors"


TRUNKS: dict[str, Case] = {
    "trunk-exists": (lambda b: ["init", b.trunk, "--base", b.base, "--rule", "average"], "is a trunk already"),
    "trunk-on-files": (
        lambda b: ["init", b.directory({"a.txt": "x"}), "--base", b.base, "--rule", "average"],
        "not empty",
    ),
    "trunk-is-a-file": (lambda b: ["init", b.raw(b"x", "f"), "--base", b.base, "--rule", "average"], "not empty"),
    "trunk-below-a-file": (
        lambda b: ["init", b.raw(b"x", "f") / "t", "--base", b.base, "--rule", "average"],
        "cannot be written",
    ),
    "trunk-without-a-rule": (lambda b: ["init", b.here / "new", "--base", b.base], "--rule"),
    "trunk-without-a-base": (lambda b: ["init", b.here / "new", "--rule", "average"], "--base"),
    "trunk-on-a-broken-base": (
        lambda b: [
            "init",
            b.here / "new",
            "--base",
            b.tensors({"layer.bias": torch.full((6,), NAN)}),
            "--rule",
            "average",
        ],
        "NaN or infinite",
    ),
    "not-a-trunk": (lambda b: ["add", b.directory({}), b.other], "not a trunk"),
    "not-a-trunk-to-log": (lambda b: ["log", b.here / "nowhere"], "not a trunk"),
    "not-a-trunk-to-show": (lambda b: ["show", b.raw(b"", "file")], "not a trunk"),
    "not-a-trunk-to-verify": (lambda b: ["verify", b.here / "nowhere"], "not a trunk"),
    "not-a-trunk-to-export": (lambda b: ["export", b.here / "nowhere", b.out], "not a trunk"),
    "not-a-trunk-to-rollback": (lambda b: ["rollback", b.here / "nowhere", 1], "not a trunk"),
    "rollback-missing": (lambda b: ["rollback", b.trunk, 9], "no step 9; the last is 4"),
    "rollback-negative": (lambda b: ["rollback", b.trunk, "--", "-1"], "no step -1"),
    "rollback-unkept": (lambda b: ["rollback", b.trunk, 1], "no longer kept; there are those of 0, 3, 4"),
    "rollback-a-word": (
        lambda b: ["rollback", b.trunk, "yesterday"],
        "neither the number of a step nor a tag; the trunk has no tags",
    ),
    "show-missing": (lambda b: ["show", b.trunk, 5], "no step 5"),
    "remove-unknown": (
        lambda b: ["remove", b.trunk, "seven", "--from", b.arrival],
        "holds no task 'seven'; it holds one",
    ),
    "remove-from-others": (
        lambda b: ["remove", b.trunk, "one", "--from", b.other],
        "is not what was folded in as 'one'",
    ),
    "remove-from-nowhere": (lambda b: ["remove", b.trunk, "one", "--from", b.here / "nowhere"], "no such file"),
    "remove-without-from": (lambda b: ["remove", b.trunk, "one"], "--from"),
    "remove-not-additive": (lambda b: ["remove", _opcm(b), "one", "--from", b.arrival], "not a sum; use 'rollback'"),
    "task-taken": (lambda b: b.add(None, "--task", "one"), "another --task"),
    "task-empty": (lambda b: b.add(None, "--task", ""), "not empty"),
    "task-with-newline": (lambda b: b.add(None, "--task", "a\nb"), "printable"),
    "same-weights": (lambda b: b.add(b.arrival), "--again"),
    "arrival-is-a-trunk": (lambda b: b.add(b.trunk), "trunk"),
    "journal-not-json": (lambda b: ["log", b.edit("journal.jsonl", lambda t: "{" + t)], "line 1: not a journal record"),
    "journal-a-number": (
        lambda b: ["show", b.edit("journal.jsonl", lambda t: t + "7\n")],
        "line 6: not a journal record",
    ),
    "journal-changed": (
        lambda b: ["log", b.edit("journal.jsonl", lambda t: t.replace('"one"', '"eno"'))],
        "line 2: the record of step 1 was changed",
    ),
    "journal-shortened": (
        lambda b: ["add", b.edit("journal.jsonl", lambda t: "\n".join(t.split("\n")[:-2]) + "\n"), b.other],
        "cut off",
    ),
    "journal-empty": (lambda b: ["log", b.edit("journal.jsonl", lambda t: "")], "journal is empty"),
    "journal-not-text": (lambda b: ["log", _binary_journal(b)], "line 1: not a journal record"),
    "settings-not-json": (lambda b: ["add", b.edit("trunk.json", lambda t: t[:-9]), b.other], "trunk.json"),
    "settings-a-list": (lambda b: ["log", b.edit("trunk.json", lambda t: "[]")], "trunk.json"),
    "settings-of-tomorrow": (
        lambda b: ["add", b.edit("trunk.json", lambda t: t.replace('"format": 3', '"format": 9')), b.other],
        "format 9",
    ),
    "settings-without-rule": (
        lambda b: ["log", b.edit("trunk.json", lambda t: t.replace('"rule"', '"rool"'))],
        "'rule'",
    ),
    "settings-changed": (
        lambda b: ["add", b.edit("trunk.json", lambda t: t.replace('"keep": 2', '"keep": 1')), b.other],
        "was changed after 'init'",
    ),
    "settings-of-odd-kinds": (
        lambda b: ["log", b.edit("trunk.json", lambda t: t.replace('"options": {}', '"options": 3'))],
        "trunk.json",
    ),
    "memory-missing": (lambda b: _without(b, "steps/000004/state.safetensors"), "is missing after step 4"),
    "snapshot-missing": (lambda b: _without(b, "steps/000004"), "000004"),
    "snapshots-missing": (lambda b: _without(b, "steps"), "steps"),
}


def _opcm(box: Box) -> Path:
    trunk = mw.Trunk.create(box.here / "opcm", box.base, "opcm")
    trunk.add(box.arrival, task="one")
    return trunk.path


def _binary_journal(box: Box) -> Path:
    (box.trunk / "journal.jsonl").write_bytes(b"\xff\xfe\n")
    return box.trunk


def _without(box: Box, part: str) -> list[Any]:
    path = box.trunk / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return box.add()


Q = "base_model.model.layer.square"
LORAS: dict[str, Case] = {
    "lora-config-not-json": (lambda b: b.merge(b.directory({"adapter_config.json": "{"})), "not valid JSON"),
    "lora-config-a-list": (lambda b: b.merge(b.directory({"adapter_config.json": "[]"})), "not an object"),
    "lora-without-weights": (lambda b: b.merge(b.lora({}, {})), "adapter_model.safetensors is missing"),
    "lora-of-another-type": (lambda b: b.merge(b.lora({"peft_type": "LOHA"})), "type LOHA"),
    "lora-without-type": (lambda b: b.merge(b.lora({"peft_type": None})), "only LORA"),
    "lora-rank-zero": (lambda b: b.merge(b.lora({"r": 0})), "r is 0"),
    "lora-alpha-a-word": (lambda b: b.merge(b.lora({"lora_alpha": "4"})), "lora_alpha is '4'"),
    "lora-rank-pattern-a-list": (lambda b: b.merge(b.lora({"rank_pattern": ["q"]})), "rank_pattern"),
    "lora-rank-pattern-zero": (lambda b: b.merge(b.lora({"rank_pattern": {"square": 0}})), "rank_pattern"),
    "lora-alpha-pattern-no-regex": (lambda b: b.merge(b.lora({"alpha_pattern": {"(": 1}})), "alpha_pattern"),
    "lora-dora": (lambda b: b.merge(b.lora({"use_dora": True})), "DoRA"),
    "lora-only-a": (lambda b: b.merge(b.lora({}, {f"{Q}.lora_A.weight": torch.ones(2, 6)})), "only one of"),
    "lora-foreign-tensor": (lambda b: b.merge(b.lora({}, {f"{Q}.lora_mu": torch.ones(2)})), "holds no LoRA factors"),
    "lora-of-another-model": (
        lambda b: b.merge(b.lora({}, {f"x.lora_{s}.weight": torch.ones(SQUARE[s]) for s in "AB"})),
        "adapter of another model",
    ),
    "lora-of-another-shape": (
        lambda b: b.merge(b.lora({}, {f"{Q}.lora_A.weight": torch.ones(2, 5), f"{Q}.lora_B.weight": torch.ones(6, 2)})),
        "do not make an update",
    ),
    "lora-nan": (
        lambda b: b.merge(b.lora({}, {f"{Q}.lora_{s}.weight": torch.full(SQUARE[s], NAN) for s in "AB"})),
        "NaN or infinite",
    ),
    "lora-overflow": (
        lambda b: b.merge(b.lora({}, {f"{Q}.lora_{s}.weight": torch.full(SQUARE[s], 1e30) for s in "AB"})),
        "does not fit",
    ),
    "lora-as-base": (lambda b: b.merge(base=b.lora({})), "adapter cannot be a base"),
}

GROUPS = {
    "file": FILES,
    "value": VALUES,
    "directory": DIRECTORIES,
    "option": OPTIONS,
    "output": OUTPUTS,
    "trunk": TRUNKS,
    "lora": LORAS,
}
CASES = {f"{group}:{name}": case for group, cases in GROUPS.items() for name, case in cases.items()}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """What the cases share: checkpoints, and a trunk that is copied for each of them."""
    folder = tmp_path_factory.mktemp("shared")
    for seed, name in enumerate(("base", "one", "two", "three", "four", "other")):
        save_file(draw_tensors(seed), folder / f"{name}.safetensors")
    trunk = mw.Trunk.create(folder / "trunk", folder / "base.safetensors", "average")
    for name in ("one", "two", "three", "four"):
        trunk.add(folder / f"{name}.safetensors")
    return folder


def unlocked(found: dict[str, str]) -> dict[str, str]:
    """Without the lock, which a writer makes before it looks at anything."""
    return {name: digest for name, digest in found.items() if not name.endswith("/lock")}


@pytest.fixture
def box(shared, tmp_path) -> Box:
    shutil.copytree(shared / "trunk", tmp_path / "trunk")
    return Box(tmp_path, shared)


def test_there_are_enough_cases():
    assert len(CASES) >= 60
    assert set(draw_tensors(0)) == set(SHAPES)


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_changed(box, shared, call, name):
    build, words = CASES[name]
    command = build(box)
    before = unlocked(listing(box.here, shared))
    line = call(*command).mistake()
    assert words in line
    assert "bug in mergeway" not in line
    assert unlocked(listing(box.here, shared)) == before


@pytest.mark.parametrize("name", ["file:truncated", "option:command-unknown"])
def test_the_same_in_a_process_of_its_own(box, shared, run, name):
    build, words = CASES[name]
    command = build(box)
    before = unlocked(listing(box.here, shared))
    done = run(*command)
    assert words in done.mistake()
    assert done.out == ""
    assert unlocked(listing(box.here, shared)) == before


def test_the_box_is_right_before_the_mistake(box, call):
    """Each kind of case works when nothing is wrong with it, so that it is the mistake that fails."""
    call(*box.merge()).ok()
    call(*box.add()).ok()
    shutil.rmtree(box.out)
    call(*box.merge(box.shards(MAP))).ok()
    shutil.rmtree(box.out)
    shutil.rmtree(box.here / "model")
    call(*box.merge(box.lora({}))).ok()
    call(*_init(box, "--rule", "opcm", "--set", "alpha=0.5")).ok()
    shutil.rmtree(box.out)
    call(*box.merge(box.tensors({}))).ok()
