"""The row of continual fine-tuning: one model tuned on task after task, where a suite comes with such checkpoints."""

from __future__ import annotations

from mergeway.checkpoint import open_checkpoint
from mergeway.errors import OptionError
from mergeway.paper.study import Study


def continual_accuracies(study: Study, length: int) -> dict[str, float] | None:
    """What the model that was tuned on the first `length` tasks, one after another, reaches on each of them.

    The suite names it in its suite.json: "continual": {"8": directory}, by the number of tasks. None where it does not.
    """
    suite = study.suite
    named = suite.settings.get("continual") or {}
    if not isinstance(named, dict) or not all(isinstance(n, str) for n in named.values()):
        raise OptionError(f"{suite.path / 'suite.json'}: 'continual' maps a number of tasks to a model directory")
    if str(length) not in named:
        return None

    def judge() -> dict[str, float]:
        model = open_checkpoint(suite.path / named[str(length)], open_checkpoint(suite.base))
        params = {name: model.read(name) for name in model.infos}
        seen = [t.name for t in suite.tasks[:length]]
        return dict(zip(seen, suite.accuracies(params, seen, seen), strict=True))

    return study.kept(f"continual-{length}", {"model": named[str(length)]}, judge)
