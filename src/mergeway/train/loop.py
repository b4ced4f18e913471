"""Fine-tuning: one task, or several jointly, under frozen heads, from the base, an expert or a trunk."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mergeway.calibration.loss import Predict, cross_entropy, targets
from mergeway.calibration.samples import Samples, require_labels
from mergeway.calibration.suite import SuiteData
from mergeway.checkpoint import Checkpoint, inspect_checkpoint, open_checkpoint
from mergeway.checkpoint.directory import check_apart, check_free
from mergeway.core.pool import keeping_freed_blocks
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.model.tangent import Tangent
from mergeway.train.arrival import Settings, write_arrival
from mergeway.train.classes import among_own, distilled_heads, matrix_of
from mergeway.train.interrupted import Saved, State
from mergeway.train.lora import LoraFactors
from mergeway.train.regularisers import distillation, penalty, read_fisher, running_fisher
from mergeway.train.start import Begun, open_start
from mergeway.train.training import Start, Training


@dataclass(frozen=True)
class Finetuned:
    """The result of a fine-tuning: an arrival in `out`, its parameters, the second moments of Adam, and the loss of every step."""

    out: Path | None
    params: dict[str, Tensor]
    moments: dict[str, Tensor]
    log: list[dict[str, float]]


def finetune(
    suite: SuiteData,
    tasks: str | Sequence[str],
    out: str | Path | None = None,
    training: Training | None = None,
    *,
    start: Start = None,
    learned: Sequence[str] | None = None,
    save_every: int = 100,
    force: bool = False,
    command: str | None = None,
    progress: Progress = SILENT,
) -> Finetuned:
    """Tune a suite's model on a task (several: jointly) and write the arrival, or only return it when `out` is None.

    `start` is the base unless it names an expert, a trunk or tensors; `learned` are the tasks behind it, where it does not say
    so itself. Killed and called again, it goes on to the same bits.
    """
    training = training or Training()
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    data = [require_labels(suite.samples(name, "train"), "training needs them") for name in names]
    base = open_checkpoint(suite.base)
    if training.lora and start is not None:
        raise OptionError("--lora with --start: an adapter belongs to the base; train it from there")
    begun = open_start(base, start, learned)
    goal = Path(out) if out is not None else None
    if goal is not None:
        check_free(goal, force)
        check_apart(goal, [str(suite.base), *([str(begun.folder)] if begun.folder else [])])
    work = _Work(suite, among_own(suite, names, data, training), base, begun, training)
    described = {
        "suite": suite.name,
        "tasks": names,
        "start": inspect_checkpoint(begun.checkpoint).digest,
        "training": json.dumps(asdict(training)),
    }
    state = State(goal, described) if goal is not None else None
    with keeping_freed_blocks():
        work.run(state, save_every, progress)
    done = Finetuned(goal, work.tensors(), work.moments(), work.log)
    if goal is not None and state is not None:
        behind = [*(begun.learned or ()), *names]
        settings = Settings(suite.name, names, behind, _named(start), work.step, training, command)
        write_arrival(goal, base, done, work.lora, work.fisher_after(), settings, force)
        state.drop()
    return done


class _Work:
    """One training under way."""

    def __init__(
        self,
        suite: SuiteData,
        data: list[Samples],
        base: Checkpoint,
        begun: Begun,
        training: Training,
    ) -> None:
        self.training, self.data, self.log, self.step = training, data, [], 0
        names = [n for n, i in base.infos.items() if i.merges]
        self._compute = suite.compute
        frozen = _pattern(training.freeze)
        self.predict: Predict = suite.model
        self.lora = LoraFactors(suite, base, training, frozen) if training.lora else None
        if self.lora is not None:
            self.predict, self.params = self.lora.model, self.lora.params
            self.trained = {n: p.requires_grad_() for n, p in self.params.items()}
        else:
            # A copy: what is read may be a file in the place of memory, and is not to be written to.
            self.params = self._compute.put({n: begun.checkpoint.read(n).float().clone() for n in names})
            self.trained = {n: p.requires_grad_() for n, p in self.params.items() if not (frozen and frozen.search(n))}
        if not self.trained:
            raise OptionError(f"--freeze {training.freeze!r}: leaves no parameter to train")
        self._anchor = {n: p.detach().clone() for n, p in self.params.items()}
        if training.tangent:
            self.predict = Tangent(suite.model, {n: base.read(n).float() for n in names})
        self.optimiser = torch.optim.AdamW(
            list(self.trained.values()), lr=training.lr, weight_decay=training.weight_decay
        )
        self._fisher = read_fisher(begun.folder, self.params) if training.ewc else {}
        self._guard = self._compute.put(self._fisher)
        self._taught = distilled_heads(suite, [d.task for d in data], begun.learned, training)
        # Every example of every task, as (task, number).
        self._examples = [(k, i) for k, samples in enumerate(data) for i in range(len(samples))]

    def run(self, state: State | None, save_every: int, progress: Progress) -> None:
        """All steps, from where a killed training was."""
        total = self.training.total_steps(len(self._examples))
        found = state.read() if state is not None else None
        if found:
            self._restore(found)
            progress.note(f"going on after step {self.step} of {total}")
        progress.begin("training", total, "steps")
        progress.advance(self.step)
        for chosen in self.training.batches(len(self._examples), self.step, total):
            loss = self._one_step(chosen, self.training.rate(self.step, total))
            self.step += 1
            self.log.append({"step": self.step, "loss": loss, "lr": self.training.rate(self.step - 1, total)})
            progress.advance(1)
            progress.describe(f"training, loss {loss:.4f}")
            if state is not None and self.step % save_every == 0 and self.step < total:
                state.write(self._saved())

    def _one_step(self, chosen: Tensor, rate: float) -> float:
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        value, size = 0.0, self._compute.micro_batch or len(chosen)
        whole = sum(targets(part) for _, part in self._parts(chosen.tolist()))
        for start in range(0, len(chosen), size):
            loss = self._loss(self._parts(chosen[start : start + size].tolist()), whole)
            if self._guard and start == 0:
                loss = loss + self.training.ewc * penalty(self.params, self._anchor, self._guard).cpu()
            loss.backward()
            value += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self.training.clip)
        self.optimiser.step()
        if not math.isfinite(value):
            raise OptionError(f"the loss is {value} at step {self.step + 1}; lower --lr")
        return value

    def _loss(self, parts: list[tuple[int, Samples]], whole: int) -> Tensor:
        """What some examples of each task add to the mean loss of a batch in which so many labels or tokens are predicted."""
        total = torch.zeros(())
        for k, batch in parts:
            old = self._taught[k]
            head = batch.head if old is None else torch.cat([matrix_of(batch), old])
            logits = self.predict(self.params, batch.inputs, head)
            loss = cross_entropy(logits if old is None else logits[:, : -len(old)], batch.labels)
            if old is not None:
                with torch.no_grad():
                    taught = self.predict(self._anchor, batch.inputs, old)
                loss = loss + self.training.lwf * distillation(
                    logits[:, -len(old) :], taught, self.training.temperature
                )
            total = total + loss.cpu() * (targets(batch) / whole)
        return total

    def _parts(self, chosen: list[int]) -> list[tuple[int, Samples]]:
        """The chosen examples of each task, with the task's number."""
        examples = [self._examples[i] for i in chosen]
        index = [[i for j, i in examples if j == k] for k in range(len(self.data))]
        return [(k, self.data[k].rows(torch.tensor(mine)).trimmed()) for k, mine in enumerate(index) if mine]

    def _saved(self) -> Saved:
        return {
            "step": self.step,
            "log": self.log,
            "params": {n: p.detach() for n, p in self.trained.items()},
            "optimiser": self.optimiser.state_dict(),
        }

    def _restore(self, state: Saved) -> None:
        self.step, self.log = state["step"], list(state["log"])
        with torch.no_grad():
            for name, value in state["params"].items():
                self.trained[name].copy_(value)
        self.optimiser.load_state_dict(state["optimiser"])

    def tensors(self) -> dict[str, Tensor]:
        """The weights as they stand, those that an adapter makes included."""
        if self.lora is not None:
            return self.lora.merged()
        return {n: p.detach().cpu() for n, p in self.params.items()}

    def moments(self) -> dict[str, Tensor]:
        """Adam's second moments by name; a parameter that took no part has none, nor has a weight that only has factors."""
        if self.lora is not None:
            return {}
        held = self.optimiser.state
        return {n: held[p]["exp_avg_sq"].detach().clone().cpu() for n, p in self.trained.items() if p in held}

    def fisher_after(self) -> dict[str, Tensor]:
        """The Fisher information to hand on, for EWC."""
        if not self.training.ewc:
            return {}
        return running_fisher(self.predict, self.tensors(), self.data, self._fisher, self.training)


def _named(start: Start) -> str:
    """A start in the words of training.json."""
    return str(start) if isinstance(start, str | Path) else "base" if start is None else "tensors"


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text is not None else None
    except re.error as problem:
        raise OptionError(f"--freeze {text!r}: not a regular expression ({problem})") from None
