"""The gate of `add`: judged before the commit, beside `transformers` alone; refused folds leave nothing behind."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from shared import listing
from transformers import CLIPVisionModelWithProjection

import mergeway as mw
from mergeway.errors import GateRefused, OptionError


def accuracy(suite, task: str, tensors, split: str = "test", rows=None) -> float:
    """Top-1 accuracy in percent, by the module of transformers and the arrays in the file."""
    model = CLIPVisionModelWithProjection.from_pretrained(suite.base)
    model.load_state_dict({n: t for n, t in tensors.items() if n in model.state_dict()}, strict=False)
    with np.load(suite.path / "data" / f"{task}.npz") as file:
        x, y = torch.from_numpy(file[f"x_{split}"]), torch.from_numpy(file[f"y_{split}"])
    head = load_file(suite.path / "heads" / f"{task}.safetensors")["weight"]
    with torch.no_grad():
        features = model(pixel_values=(x.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).image_embeds
    hits = (features @ head.mT).argmax(-1) == y
    return 100 * float((hits if rows is None else hits[rows]).float().mean())


def test_scores_are_those_of_the_models_themselves(vision, tmp_path):
    """Before, after and of the arrival alone, in the journal, where `log` and `show` find them."""
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "average")
    trunk.add(vision.task("ants").expert, "ants")
    before = trunk.params()
    record = trunk.add(
        vision.task("bees").expert, "bees", check={t: f"{vision.path}#{t}" for t in ("ants", "bees")}, message="why not"
    )
    after = trunk.params()
    rows = {row["task"]: row for row in record.details["checks"]}
    expert = load_file(vision.task("bees").expert / "model.safetensors")
    for task in ("ants", "bees"):
        assert rows[task]["before"] == pytest.approx(accuracy(vision, task, before))
        assert rows[task]["after"] == pytest.approx(accuracy(vision, task, after))
        assert rows[task]["samples"] == 20
    assert rows["bees"]["arrival"] == pytest.approx(accuracy(vision, "bees", expert)) and "arrival" not in rows["ants"]
    assert record.details["message"] == "why not"
    assert trunk.verify() == []


def test_the_card_of_an_export_has_what_the_gate_found(vision, tmp_path):
    """As the hub reads it; only of a model that was judged, and not of an adapter, which is another model."""
    from huggingface_hub import ModelCard

    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "average", keep=9)
    data = {t: f"{vision.path}#{t}" for t in ("ants", "bees")}
    trunk.add(vision.task("ants").expert, "ants", check={"ants": data["ants"]})
    record = trunk.add(vision.task("bees").expert, "bees", check=data)
    found = {row["task"]: row["after"] for row in record.details["checks"]}
    card = ModelCard.load(trunk.export(tmp_path / "out") / "README.md")
    results = {r.dataset_name: (r.metric_type, r.metric_value) for r in card.data.eval_results}
    assert results == {task: ("accuracy", pytest.approx(value / 100)) for task, value in found.items()}
    assert card.data.metrics == ["accuracy"]
    assert f"| ants | accuracy | {found['ants']:.1f} | 20 |" in card.text
    trunk.rollback(1)
    [back] = ModelCard.load(trunk.export(tmp_path / "back") / "README.md").data.eval_results
    assert (back.dataset_name, back.metric_value) == (
        "ants",
        pytest.approx(trunk.log()[1].details["checks"][0]["after"] / 100),
    )
    trunk.export_lora(tmp_path / "lora", 2)
    trunk.add(vision.task("cats").expert, "cats")
    trunk.export(tmp_path / "unjudged")
    for name in ("lora", "unjudged"):
        assert ModelCard.load(tmp_path / name / "README.md").data.eval_results is None


def test_a_fold_that_costs_too_much_is_refused(vision, tmp_path, call):
    """Exit 3, a table, and not a byte of the trunk changed; what is allowed goes through."""
    path = tmp_path / "trunk"
    trunk = mw.Trunk.create(path, vision.base, "average")
    trunk.add(vision.task("ants").expert, "ants")
    before = listing(path)
    alone = accuracy(vision, "ants", trunk.params())
    mixed = mw.merge(vision.base, [vision.task(t).expert for t in ("ants", "bees")])
    cost = alone - accuracy(vision, "ants", mixed)
    assert cost > 4  # else this suite says nothing here
    words = ["add", path, vision.task("bees").expert, "--check", f"ants={vision.path}#ants"]
    done = call(*words, "--max-drop", cost - 1)
    assert done.code == 3
    assert f"'ants' would fall by {cost:.2f} points" in done.err and "nothing was deployed" in done.err
    assert f"{-cost:+.2f}" in done.out and "ants" in done.out
    assert listing(path) == before
    done = call(*words, "--min", "ants=99.5", "--json")
    assert done.code == 3 and "at least 99.5 are asked" in done.err
    assert json.loads(done.out)["checks"][0]["task"] == "ants"
    with pytest.raises(GateRefused) as refused:
        trunk.add(vision.task("bees").expert, check={"ants": f"{vision.path}#ants"}, max_drop=cost - 1)
    assert refused.value.checks[0]["before"] == pytest.approx(alone)
    assert listing(path) == before
    done = call(*words, "--max-drop", cost - 1, "--dry-run")
    assert done.code == 3
    done = call(*words, "--max-drop", cost + 1, "--dry-run").ok()
    assert "nothing was committed" in done.out and listing(path) == before
    done = call(*words, "--max-drop", cost + 1, "-m", "as agreed").ok()
    assert "message  as agreed" in done.out
    assert f"ants {alone - cost:.1f}" in call("log", path).ok().out
    assert trunk.log()[-1].step == 2


def test_log_and_report_draw_accuracy_over_steps(vision, tmp_path, call):
    path, check = tmp_path / "trunk", {t: f"{vision.path}#{t}" for t in ("ants", "bees")}
    trunk = mw.Trunk.create(path, vision.base, "average", keep=5)
    first = trunk.add(vision.task("ants").expert, "ants", check={"ants": check["ants"]})
    assert "course" not in call("log", path).ok().out  # one point is no course
    second = trunk.add(vision.task("bees").expert, "bees", check=check)
    trunk.add(vision.task("cats").expert, "cats")
    trunk.rollback(1)
    ants = [first.details["checks"][0]["after"], second.details["checks"][0]["after"]]
    bees = second.details["checks"][1]["after"]
    bars = ["▁▂▃▄▅▆▇█"[min(int(value / 12.5), 7)] for value in [*ants, bees]]
    *_, header, of_ants, of_bees = call("log", path).ok().out.rstrip().splitlines()
    assert header.split() == ["accuracy", "step", "1", "step", "2", "step", "4", "course"]
    # The step that was not judged is left out; the rollback has what was found of step 1.
    drawn = f"{bars[0]}{bars[1]}{bars[0]}"
    assert of_ants.split() == ["ants", *(f"{value:.1f}" for value in [*ants, ants[0]]), drawn]
    assert of_bees.split() == ["bees", f"{bees:.1f}", bars[2]]
    call("report", path, "--out", tmp_path / "r.html").ok()
    data = json.loads((tmp_path / "r.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert [(row["step"], row["scores"]) for row in data["judged"]] == [
        (1, {"ants": ants[0]}),
        (2, {"ants": ants[1], "bees": bees}),
        (4, {"ants": ants[0]}),
    ]
    assert data["judged"][1]["alone"] == {"bees": second.details["checks"][1]["arrival"]}


def test_held_out_samples_judge_every_later_fold(vision, tmp_path):
    """A share of the data stays in the trunk, is never folded with, and is judged again at each add."""
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "ode", step=0.5, memory=mw.Bounds(24))
    first = trunk.add(vision.task("ants").expert, "ants", data=f"{vision.path}#ants", holdout=0.25)
    [row] = first.details["checks"]
    assert (row["task"], row["samples"]) == ("ants", 6)
    assert trunk.memory()["tasks"][0]["samples"] == 18
    held = {bytes(x.numpy()) for x in trunk.held_out().tasks[0].tensors["images"]}
    kept = {bytes(x.numpy()) for x in trunk.remembered().tasks[0].tensors["images"]}
    assert len(held) == 6 and not held & kept
    with np.load(vision.path / "data" / "ants.npz") as file:
        rows = [k for k, x in enumerate(file["x_train"]) if x.tobytes() in held]
    assert row["after"] == pytest.approx(accuracy(vision, "ants", trunk.params(), "train", rows))
    with pytest.raises(GateRefused):
        trunk.add(vision.task("bees").expert, "bees", data=f"{vision.path}#bees", at_least={"ants": 100.0})
    second = trunk.add(vision.task("bees").expert, "bees", data=f"{vision.path}#bees", holdout=0.25)
    assert [r["task"] for r in second.details["checks"]] == ["ants", "bees"]
    assert [r["task"] for r in trunk.memory()["tasks"]] == ["ants", "bees"]
    trunk.rollback(1)
    assert [t.task for t in trunk.held_out().tasks] == ["ants"]
    assert trunk.verify() == []


def test_a_rule_without_data_can_hold_out_too(vision, tmp_path):
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "average")
    for task in ("ants", "bees", "cats"):
        record = trunk.add(vision.task(task).expert, task, data=f"{vision.path}#{task}", holdout=0.5)
    assert [r["samples"] for r in record.details["checks"]] == [12, 12, 12]
    assert trunk.memory()["samples"] == 0
    trunk.remove("bees", vision.task("bees").expert)
    assert [t.task for t in trunk.held_out().tasks] == ["ants", "cats"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-drop", "1"], "nothing is judged"),
        (["--max-drop", "-1"], "it is a number of points"),
        (["--min", "ants=x"], "expected a percentage"),
        (["--min", "ants=101"], "0 to 100"),
        (["--min", "ants=90"], "nothing judges that task"),
        (["--check", "ants"], "expected TASK=VALUE"),
        (["--check", "ant={suite}#ants"], "did you mean 'ants'"),
        (["--check", "ants=nowhere.npz"], "the task's head is needed too"),
        (["--holdout", "0.5"], "give it with --data"),
        (["--holdout", "1.5", "--data", "{suite}#bees"], "more than 0 and less than 1"),
    ],
)
def test_mistakes(vision, tmp_path, call, options, said):
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "average")
    trunk.add(vision.task("ants").expert, "ants")
    before = listing(trunk.path)
    words = [word.replace("{suite}", str(vision.path)) for word in options]
    assert said in call("add", trunk.path, vision.task("bees").expert, *words).mistake()
    assert listing(trunk.path) == before


def test_several_at_once(vision, tmp_path, call):
    """One commit each; the first refusal ends it and says what was committed."""
    path = tmp_path / "trunk"
    mw.Trunk.create(path, vision.base, "average")
    experts = [vision.task(t).expert for t in tiny.TASKS]
    done = call("add", path, *experts, "--check", f"ants={vision.path}#ants", "--max-drop", "0")
    assert done.code == 3
    assert "committed before: step 1 'ants'" in done.err
    assert [r.task for r in mw.Trunk.open(path).log()[1:]] == ["ants"]
    assert "--task: is for one arrival" in call("add", path, *experts[1:], "--task", "x").mistake()
    rows = call("add", path, *experts[1:], "--json").json()
    assert [row["task"] for row in rows] == ["bees", "cats"]
    done = call("add", path, tmp_path / "nowhere", experts[0]).mistake()
    assert "committed before: nothing" in done


def test_in_python_the_mistakes_are_typed(vision, tmp_path):
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "average")
    with pytest.raises(OptionError):
        trunk.add(vision.task("ants").expert, max_drop=float("nan"))
