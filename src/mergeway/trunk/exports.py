"""Exports of a trunk: a step's model as a directory of its own, or as an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath

import torch

from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.adapter import Adapter, write_adapter
from mergeway.checkpoint.directory import check_apart
from mergeway.checkpoint.export import write_model
from mergeway.checkpoint.heads import Head, label_config, read_heads, with_head, write_beside
from mergeway.checkpoint.source import JsonObject
from mergeway.checkpoint.writer import DEFAULT_SHARD
from mergeway.core.pool import worker_pool
from mergeway.errors import OptionError, TrunkError
from mergeway.fold.card import adapter_notes, model_card
from mergeway.trunk.base import Outline
from mergeway.trunk.remote import RemoteStore
from mergeway.trunk.view import Step, TrunkView


class Exports(TrunkView):
    """What leaves a trunk."""

    @property
    def name(self) -> str:
        """What the trunk's directory is called, here or on a remote."""
        return PurePath(self._store.url if isinstance(self._store, RemoteStore) else self.path.absolute()).name

    def export(
        self,
        out: str | Path,
        *,
        dtype: torch.dtype | None = None,
        task: str | None = None,
        backbone: bool = False,
        shard_size: int = DEFAULT_SHARD,
        force: bool = False,
        step: Step | None = None,
        command: str | None = None,
    ) -> Path:
        """Write the deployed model, or that of a `step` whose snapshot is kept, as a model directory that `transformers` loads.

        Where tasks keep heads for themselves, name the `task` whose head takes its place in the model, or ask for the `backbone`:
        the model with the base's own head, and all heads of tasks beside it, as `heads/TASK.safetensors`.
        """
        check_apart(Path(out), self._kept_base.named_places())
        at = self._store.journal().last.step if step is None else self.record(step).step
        model = self.deployed(step)
        heads = read_heads(self._store.of(self.record(at)).directory("heads"))
        own = self._head(heads, task, backbone)
        base = self._kept_base.outline(model) or self._open_base()
        return write_model(
            Path(out),
            with_head(model, own) if own else model,
            base.directory,
            self._card(base, at, command, task),
            dtype,
            shard_size,
            force,
            self._progress,
            (lambda stage: label_config(stage, own)) if own else (lambda stage: write_beside(stage, heads)),
        )

    def export_lora(
        self,
        out: str | Path,
        rank: int,
        *,
        dtype: torch.dtype = torch.float32,
        task: str | None = None,
        backbone: bool = False,
        force: bool = False,
        step: Step | None = None,
        command: str | None = None,
    ) -> Adapter:
        """Write the deployed model's distance from the base as a PEFT adapter, and say what each layer kept of it.

        `task`, `backbone` and `step` are those of `export`; the head of a task is stored whole, among peft's `modules_to_save`.
        """
        check_apart(Path(out), self._kept_base.named_places())
        at = self._store.journal().last.step if step is None else self.record(step).step
        model = self.deployed(step)
        heads = read_heads(self._store.of(self.record(at)).directory("heads"))
        own = self._head(heads, task, backbone)
        base = self._open_base()
        with worker_pool(self._threads) as pool:
            return write_adapter(
                Path(out),
                model,
                base,
                rank,
                lambda adapter: self._card(
                    base, at, command, task, "peft", adapter_notes(adapter.kept, adapter.rank, task, own)
                ),
                dtype,
                force,
                pool,
                self._progress,
                own.tensors if own else None,
                lambda stage: write_beside(stage, {} if own else heads),
            )

    def _card(
        self,
        base: Checkpoint | Outline,
        step: int,
        command: str | None,
        task: str | None,
        library: str = "transformers",
        notes: str = "",
    ) -> str:
        rows = [(f.task, f.source, f.digest, f.weight) for f in self.folded(step)]
        # An adapter is not the model that was judged, and a model with one task's head is of no use on others.
        checks = [row for row in self._checks(step) if library == "transformers" and task in (None, row["task"])]
        return model_card(base, self.base_digest, rows, self.described_rule, command, library, notes, checks)

    def _checks(self, step: int) -> list[JsonObject]:
        """What the gate found of a step's model; a rollback deployed what had been judged before."""
        record = self.record(step)
        while record.kind == "rollback":
            record = self.record(int(record.details["to"]))
        return list(record.details.get("checks", []))

    def _head(self, heads: Mapping[str, Head], task: str | None, backbone: bool) -> Head | None:
        """The head that an export is to have; without one of a task it would have the base's, which no arrival has trained."""
        if task is not None and backbone:
            raise OptionError("--task and --backbone: give one of them")
        if task is not None and task not in heads:
            raise TrunkError(
                f"{self.path}: task '{task}' has no head of its own; those that have one: {', '.join(heads) or 'none'}"
            )
        if heads and task is None and not backbone:
            raise TrunkError(
                f"{self.path}: each task has a head of its own ({', '.join(heads)}), and the deployed model only the base's; export one task with --task NAME, or the backbone with all heads beside it with --backbone"
            )
        return heads[task] if task is not None else None
