"""The whole way: runs of a real Trainer, a gate that refuses one, the hub, another directory, a task less, a report."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import fake_hub
import pytest
import torch
from shared import listing

import mergeway as mw

pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
SCRIPT = Path(__file__).parents[2] / "examples" / "story" / "train.py"


def accuracy(model: Path, task: str, held_out: Path) -> float:
    """By the class and tokenizer that `transformers` loads, and nothing of ours."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    rows = [json.loads(line) for line in (held_out / f"{task}.jsonl").read_text().splitlines()]
    tokens = AutoTokenizer.from_pretrained(model)([row["text"] for row in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        found = BertForSequenceClassification.from_pretrained(model).eval()(**tokens).logits.argmax(-1)
    return 100 * float((found == torch.tensor([row["label"] for row in rows])).float().mean())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_from_runs_to_the_hub_and_on(tmp_path, monkeypatch, call, run):
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(SCRIPT))
    script["make_base"]()
    trunk = mw.Trunk.create("trunk", "bert", "average")
    held_out = tmp_path / "held-out"

    # Three runs: one taken, one refused, one taken.
    first = script["train"]("colour", 0.001)
    before = listing(Path("trunk"))
    ruined = script["train"]("animal", 0.3)
    assert first.record.task == "colour" and ruined.record is None
    assert "'colour' would fall by" in str(ruined.refused) and listing(Path("trunk")) == before
    second = script["train"]("animal", 0.001)
    assert [r.task for r in trunk.log()[1:]] == ["colour", "animal"] and second.refused is None

    # What the gate wrote down is what a user of the export gets.
    judged = {row["task"]: row for row in second.record.details["checks"]}
    for task in ("colour", "animal"):
        exported = trunk.export(tmp_path / "exports" / task, task=task)
        assert judged[task]["after"] == pytest.approx(accuracy(exported, task, held_out))
    assert judged["animal"]["arrival"] == pytest.approx(accuracy(Path("runs/animal/checkpoint-60"), "animal", held_out))
    assert judged["colour"]["before"] - judged["colour"]["after"] <= 5

    between = call("diff", "trunk", "1", "2", "--json").json()
    assert between["accuracies"] == {
        "colour": [judged["colour"]["before"], judged["colour"]["after"]],
        "animal": [None, judged["animal"]["after"]],
    }
    assert between["whole"]["distance"] > 0

    with fake_hub.fake_hub() as hub:
        pushed = run("push", "trunk", "team/words", "--task", "animal", "--json", env=hub.environment()).json()
        downloaded = tmp_path / "downloaded"
        downloaded.mkdir()
        for name, content in hub.repos["team/words"].items():
            (downloaded / name).write_bytes(content)
    assert pushed["step"] == 2
    assert accuracy(downloaded, "animal", held_out) == pytest.approx(judged["animal"]["after"])

    # Another directory, for all of them.
    elsewhere = tmp_path / "shelf"
    elsewhere.mkdir()
    for name in ("trunk", "bert", "runs"):
        shutil.move(name, elsewhere)
    shelf = elsewhere / "trunk"
    assert "intact" in call("verify", shelf).ok().out
    call("remove", shelf, "colour", "--from", elsewhere / "runs" / "colour" / "checkpoint-60").ok()
    left = mw.Trunk.open(shelf)
    assert [f.task for f in left.folded()] == ["animal"]
    alone = left.export(tmp_path / "alone", task="animal")
    assert accuracy(alone, "animal", held_out) == pytest.approx(judged["animal"]["arrival"])

    call("report", shelf, "--out", "report.html").ok()
    page = Path("report.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert not data["problems"]
    after = {"colour": judged["colour"]["after"], "animal": judged["animal"]["after"]}
    assert [(row["step"], row["scores"]) for row in data["judged"]] == [(1, {"colour": 100.0}), (2, after)]
    assert data["judged"][1]["alone"] == {"animal": judged["animal"]["arrival"]}
