"""What the benchmarks share: running commands side by side, watching their memory, generated checkpoints, and the ratio line.

Time is the shortest of several runs that take turns, because other work on the machine only ever adds to it. Memory is the
peak of the private anonymous pages of a process (`Anonymous` in /proc/<pid>/smaps_rollup), in a run of its own: pages of
mapped checkpoint files belong to the page cache and are given back whenever anyone needs them. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MERGEWAY = [sys.executable, "-m", "mergeway"]

# Builds a command that writes to the given path, which is new and removed afterwards.
Command = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Ratio:
    """One measured figure against its target."""

    what: str
    value: float
    target: float
    detail: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        verdict = "met" if self.met else "MISSED"
        return f"{self.what}: {self.value:.3g} (target {sign} {self.target:g}, {verdict}) {self.detail}".rstrip()


@dataclass(frozen=True)
class Skipped:
    """A figure that could not be measured, and why."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: skipped, {self.why}"


Outcome = Ratio | Skipped


def options(doc: str | None, runs: int = 3) -> argparse.ArgumentParser:
    """The options that all benchmarks take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="keep generated checkpoints here for the next time")
    parser.add_argument("--runs", type=int, default=runs, help=f"timed runs of each command (default {runs})")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads for every command")
    parser.add_argument("--mergekit", default=os.environ.get("MERGEKIT_YAML"), help="path of mergekit-yaml")
    return parser


@contextlib.contextmanager
def data_directory(chosen: Path | None) -> Iterator[Path]:
    """Where generated checkpoints go: the chosen directory, or one that vanishes."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="mergeway-bench-") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock on the wall, and of all cores together."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.2f} s ({self.cpu:.2f} s CPU)"


def seconds(commands: Mapping[str, Command], runs: int, threads: int, scratch: Path) -> dict[str, Spent]:
    """The shortest wall and the least CPU time of each command, in runs that take turns."""
    best = dict.fromkeys(commands, Spent(float("inf"), float("inf")))
    for _ in range(runs):
        for name, command in commands.items():
            with _output(scratch) as out:
                words = command(out)
                wall, cpu = time.perf_counter(), _children_cpu()
                finish(name, start(words, threads))
                wall, cpu = time.perf_counter() - wall, _children_cpu() - cpu
                best[name] = Spent(min(best[name].wall, wall), min(best[name].cpu, cpu))
    return best


def _children_cpu() -> float:
    """CPU seconds of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def anonymous_memory(name: str, command: Command, threads: int, scratch: Path) -> int:
    """The peak of a command's private anonymous memory in bytes."""
    with _output(scratch) as out:
        process = start(command(out), threads)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _anonymous(process.pid))
            time.sleep(0.005)
        finish(name, process)
    return peak


def start(command: list[str], threads: int) -> subprocess.Popen[str]:
    """Start a command with that many threads for torch and everything below it."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(name: str, process: subprocess.Popen[str]) -> str:
    """What a command printed; a failed one ends the benchmark."""
    output, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{name} failed with exit code {process.returncode}:\n{output[-2000:]}")
    return output


@contextlib.contextmanager
def _output(scratch: Path) -> Iterator[Path]:
    out = scratch / "output"
    try:
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _anonymous(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Anonymous:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass  # the process has just ended
    return 0


def write_stream(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    arrivals: int,
    config: Mapping[str, object],
    step: float = 0.002,
) -> tuple[Path, list[Path]]:
    """A base and arrivals of normal numbers as model directories; those that exist are taken as they are."""
    import torch
    from safetensors.torch import save_file

    targets = [folder / "base", *(folder / f"arrival{k}" for k in range(arrivals))]
    if all((target / "config.json").exists() for target in targets):
        return targets[0], targets[1:]
    generator = torch.Generator().manual_seed(0)
    base = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for target in targets:
        model = base
        if target is not targets[0]:
            model = {n: t + step * torch.randn(t.shape, generator=generator) for n, t in base.items()}
        target.mkdir(parents=True, exist_ok=True)
        save_file(model, target / "model.safetensors", metadata={"format": "pt"})
        # Last, so that a directory with a config is a complete one.
        (target / "config.json").write_text(json.dumps(config))
    return targets[0], targets[1:]


def llama_shapes(hidden: int, inner: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama with tied embeddings."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def llama_config(hidden: int, inner: int, layers: int, vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 512,
        "dtype": "float32",
    }


def report(outcomes: list[Outcome]) -> int:
    """Print the outcomes; the exit code says whether every measured target was met."""
    for outcome in outcomes:
        print(outcome, flush=True)
    return 1 if any(isinstance(o, Ratio) and not o.met for o in outcomes) else 0
