"""Trainers of other packages: a `transformers.Trainer` that folds what it has trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mergeway.checkpoint.moments import FILE, write_moments
from mergeway.errors import GateRefused, OptionError
from mergeway.rules import WantsMoments
from mergeway.train.optimiser import read_optimiser
from mergeway.trunk import Trunk
from mergeway.trunk.journal import Record


class FoldCallback(TrainerCallback):
    """Folds the checkpoint that a `transformers.Trainer` saves last, or its best one, into a trunk.

    `options` are those of `Trunk.add`. A fold that its gate refuses leaves the trunk as it was; training goes on, and `refused`
    says why. With `every_save` each save is folded in place of the one before. Give the `trainer` to have every fold logged to
    whatever the trainer logs to; without it, the numbers go to the log history alone.
    """

    def __init__(
        self,
        trunk: str | Path | Trunk,
        task: str | None = None,
        weight: float = 1.0,
        *,
        every_save: bool = False,
        trainer: Trainer | None = None,
        **options: Any,
    ) -> None:
        self.trunk = trunk if isinstance(trunk, Trunk) else Trunk.open(trunk)
        self.task, self.weight, self.every_save = task, weight, every_save
        self.record: Record | None = None
        self.refused: GateRefused | None = None
        self._trainer, self._options = trainer, options
        self._saved: Path | None = None
        self._seen: Path | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.save_strategy == "no":
            raise OptionError(
                "FoldCallback folds what the Trainer saves, and save_strategy is 'no'; use 'epoch' or 'steps'"
            )
        self.record = self.refused = self._saved = self._seen = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        over = control.should_training_stop or state.global_step >= state.max_steps
        if self.every_save or over:
            self._fold(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._saved is not None:  # a run that was stopped after its last save
            self._fold(args, state)

    def _fold(self, args: TrainingArguments, state: TrainerState) -> None:
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        checkpoint = Path(best) if best else self._saved
        if not state.is_world_process_zero or checkpoint is None or checkpoint == self._seen:
            return
        self._take_back()
        self._seen, self.refused = checkpoint, None
        if isinstance(self.trunk.rule, WantsMoments) and not (checkpoint / FILE).exists():
            found = read_optimiser(checkpoint)
            write_moments(checkpoint / FILE, found.moments, found.step, found.beta2)
        try:
            self.record = self.trunk.add(str(checkpoint), self.task, self.weight, **self._options)
        except GateRefused as problem:
            self.refused = problem
        self._log(state)

    def _take_back(self) -> None:
        """The arrival of an earlier save of this run makes room for the newer one."""
        if self.record is None:
            return
        last = self.trunk.log()[-1]
        if last.hash != self.record.hash:
            raise OptionError(
                f"{self.trunk.path}: other changes came after step {self.record.step}, so that it cannot be replaced by a newer checkpoint; fold at the end of training only (every_save=False)"
            )
        self.trunk.rollback(last.step - 1)
        self.record = None

    def _log(self, state: TrainerState) -> None:
        row: dict[str, float] = {"mergeway/refused": float(self.refused is not None)}
        if self.record is not None:
            facts = self.record.details.get("facts", {})
            numbers = {key: value for key, value in facts.items() if isinstance(value, int | float)}
            row |= {"mergeway/step": float(self.record.step), "mergeway/arrivals": float(len(self.trunk.folded()))}
            row |= {f"mergeway/{key}": float(value) for key, value in numbers.items()}
            row |= _accuracies("accuracy", "after", self.record.details.get("checks", []))
        if self.refused is not None:
            # The deployed model stays, and the task that was refused has none.
            earlier = [check for check in self.refused.checks if "arrival" not in check]
            row |= _accuracies("accuracy", "before", earlier) | _accuracies("offered", "after", self.refused.checks)
        if self._trainer is not None:
            self._trainer.log(row)
        else:
            state.log_history.append({**row, "step": state.global_step})


def _accuracies(name: str, when: str, checks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {f"mergeway/{name}/{check['task']}": float(check[when]) for check in checks}
