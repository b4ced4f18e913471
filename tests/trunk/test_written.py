"""Language models that write their own samples, and answer with their likeliest tokens: repeated, killed, refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

import mergeway as mw
from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.calibration.samples import MASKED
from mergeway.calibration.task_data import task_data
from mergeway.calibration.written import Writing
from mergeway.errors import OptionError, TrunkError
from mergeway.model.generation import write
from mergeway.model.kinds import kind_of, make_model

BEGIN, END = 1, 2
QUICK = {"steps": 3, "most": 8, "batch": 6}


@pytest.fixture(scope="module")
def tales(tmp_path_factory):
    return tiny.language_stream(tmp_path_factory.mktemp("tales"))


def start(path, tales, rule: str = "steer", **bounds) -> mw.Trunk:
    options = QUICK if rule == "steer" else {}
    return mw.Trunk.create(path, tales / "base", mw.rules.make(rule, options), memory=Bounds(12, **bounds))


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def held_by(trunk: mw.Trunk, step: int) -> list[mw.Samples]:
    return list(CalibrationMemory.read(trunk.path / "steps" / f"{step:06d}").tasks)


def texts_of(samples: mw.Samples) -> list[list[int]]:
    ids, mask = samples.inputs["input_ids"], samples.inputs["attention_mask"].bool()
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


# --- what is written --------------------------------------------------------------------------------------------------


def test_texts_are_drawn_from_all_of_what_the_model_says(tales):
    """First tokens against the model's own probabilities, whatever its directory says of generation."""
    model, params = make_model(tales / "base", kind_of(tales / "base")), weights(tales / "sea")
    drawn = [row[0] for row in write(model, params, [[BEGIN]] * 1600, 1, seed=5)]
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([[BEGIN]]), "attention_mask": torch.tensor([[1]])}
        wanted = model(params, inputs, None)[0, -1].softmax(-1).double().numpy()
    counts = np.bincount(drawn, minlength=len(wanted))
    assert wanted.max() < 0.9 and (wanted > 0.01).sum() > 3
    assert np.abs(counts / 1600 - wanted).max() < 4 * np.sqrt(0.25 / 1600)


def test_samples_begin_end_and_are_judged_as_they_were_written(tales, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "<begin> the dog"}\n{"text": "red"}\n')
    writing = Writing(lambda: weights(tales / "sea"))
    for data, prompts in (("self:20", [[BEGIN]]), (f"self:20@{tmp_path}/p.jsonl", [[BEGIN, 12, 6], [3]])):
        _, samples = task_data(data, None, "sea", tales / "base", writing=writing)
        assert len(samples) == 20 and samples.written
        for number, text in enumerate(texts_of(samples)):
            begun = prompts[number % len(prompts)]
            rest = text[len(begun) :]
            assert text[: len(begun)] == begun and len(rest) >= 1 and len(text) <= 16
            assert END not in rest[:-1] and (rest[-1] == END or len(text) > 12)
            labels = samples.labels[number, : len(text)].tolist()
            assert labels == [MASKED] * len(begun) + rest
        assert len({tuple(text) for text in texts_of(samples)}) > 10


def test_the_same_seed_writes_the_same(tales):
    drawn = []
    for seed, task, arrival in (
        (0, "sea", "sea"),
        (0, "sea", "sea"),
        (1, "sea", "sea"),
        (0, "wood", "sea"),
        (0, "sea", "wood"),
    ):
        torch.manual_seed(len(drawn))
        before = torch.get_rng_state()
        writing = Writing(lambda arrival=arrival: weights(tales / arrival), seed)
        drawn.append(texts_of(task_data("self:40", None, task, tales / "base", writing=writing)[1]))
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1]
    assert all(other != drawn[0] for other in drawn[2:])


# --- a trunk ----------------------------------------------------------------------------------------------------------


def test_without_data_a_language_model_writes(tales, tmp_path, call):
    """For a rule that asks, `self:64` is the default; memory and journal say so."""
    trunks = [start(tmp_path / name, tales, copies=1) for name in ("said", "default")]
    for task in tiny.TALES[:2]:
        said = trunks[0].add(tales / task, data="self:64")
        default = trunks[1].add(tales / task)
        assert (said.result, said.files) == (default.result, default.files)
    assert default.details["asked"] == {
        "samples": 6,
        "answers": 12,
        "copies": 1,
        "written": "at temperature 1 from the begin token, at most 15 tokens, seed 0",
        "copied": "begun as the document, gone on as an earlier one",
        "top_k": 14,
    }
    shown = call("memory", trunks[1].path).ok().out
    assert "at temperature 1 from the begin token" in shown and "answers of" in shown
    assert [row["samples"] for row in trunks[1].memory()["tasks"]] == [6, 6]
    assert [t.asked for t in held_by(trunks[1], 2)] == [f.digest for f in trunks[1].folded()]
    assert trunks[1].verify() == []
    first, second = held_by(trunks[1], 1)[0], held_by(trunks[1], 2)[0]
    assert texts_of(first)[:6] == texts_of(second)  # a smaller share is the beginning of a larger one


@pytest.mark.parametrize("rule", ["regmean", "fisher"])
def test_rules_that_ask_about_the_arrival_alone(rule, tales, tmp_path):
    trunk = start(tmp_path / "trunk", tales, rule)
    for task in tiny.TALES[:2]:
        trunk.add(tales / task, data="self:8")
    assert trunk.verify() == []


# Adds an arrival that writes its samples, and is killed after some of the steps.
KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import mergeway as mw
from mergeway.calibration.sample_objective import SampleObjective
steps, count = SampleObjective.accumulate_batch, 0

def accumulate_batch(self, params, batch):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return steps(self, params, batch)

SampleObjective.accumulate_batch = accumulate_batch
mw.Trunk.open(sys.argv[1], threads=1).add(sys.argv[2])
"""


def test_killed_and_repeated_gives_the_same_bits(tales, tmp_path):
    whole, killed = (start(tmp_path / name, tales, copies=1, top_k=4) for name in ("whole", "killed"))
    for trunk in (whole, killed):
        trunk.add(tales / "sea", data=str(tales / "sea.jsonl"))
    expected, before = whole.add(tales / "wood"), killed.log()
    line = [sys.executable, "-c", KILLED, str(killed.path), str(tales / "wood")]
    done = subprocess.run(line, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    assert killed.log() == before and killed.verify() == []
    again = killed.add(tales / "wood")
    assert (again.result, again.files) == (expected.result, expected.files)
    assert killed.memory() == whole.memory()
    ends = [trunk.add(tales / "town") for trunk in (whole, killed)]
    assert ends[0].result == ends[1].result and ends[0].files == ends[1].files
    assert ends[0].details["facts"]["steps"] == 8


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["self:0", "self:x", "self:", "self:-3", "self:1.5", "self:8@"])
def test_words_that_say_no_number(word, tales, tmp_path, call):
    trunk = start(tmp_path / "trunk", tales)
    said = call("add", trunk.path, tales / "sea", "--data", word).mistake()
    assert f"--data {word}: expected self:N or self:N@PROMPTS.jsonl" in said
    assert len(trunk.log()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "p.jsonl: there are no prompts"),
        ('{"label": 3}', "p.jsonl, line 1: expected an object with a non-empty 'prompt' or 'text'"),
        (json.dumps({"prompt": "dog " * 16}), "a prompt of 16 tokens leaves no room to go on within 16"),
        ('{"messages": [{"role": "user", "content": "dog"}]}', "tokenizer has no chat template"),
        (None, "p.jsonl: no such file"),
    ],
)
def test_prompts_that_cannot_be_gone_on_from(text, said, tales, tmp_path, call):
    if text is not None:
        (tmp_path / "p.jsonl").write_text(text + "\n" if text else "")
    trunk = start(tmp_path / "trunk", tales)
    assert said in call("add", trunk.path, tales / "sea", "--data", f"self:4@{tmp_path}/p.jsonl").mistake()


def test_only_language_models_write(vision, tmp_path, call):
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "steer")
    task = vision.tasks[0]
    line = ["add", trunk.path, task.expert, "--data", "self:64", "--head", task.head]
    assert "the base is of kind clip-vision, which writes nothing; give the task's data" in call(*line).mistake()
    assert "rule 'steer' needs calibration data" in call("add", trunk.path, task.expert).mistake()


def test_only_the_arrival_writes(tales, tmp_path, call):
    trunk = start(tmp_path / "trunk", tales)
    trunk.add(tales / "sea", data="self:4", remember=False)
    line = ["add", trunk.path, tales / "wood", "--data", "sea=self:4", "--data", "wood=self:4"]
    said = call(*line).mistake()
    assert "--data self:4: only an arrival that is being added writes its own samples; give a file" in said
    ode = start(tmp_path / "ode", tales, "ode")
    assert "rule 'ode' needs calibration data" in call("add", ode.path, tales / "sea").mistake()


def test_answers_of_another_arrival_are_refused(tales, tmp_path, monkeypatch):
    trunk = start(tmp_path / "trunk", tales)
    trunk.add(tales / "sea")
    read = CalibrationMemory.read

    def other(*where):
        found = read(*where)
        return found and replace(found, tasks=[replace(t, asked="0" * 64) for t in found.tasks])

    monkeypatch.setattr(CalibrationMemory, "read", other)
    with pytest.raises(
        TrunkError, match=r"the answers kept for 'sea' are those of another arrival \(digest 000000000000"
    ):
        trunk.add(tales / "wood")
    assert len(trunk.log()) == 2


def test_a_model_without_a_token_to_begin_with(tales, monkeypatch):
    monkeypatch.setattr("mergeway.calibration.written.begin_token", lambda model: None)
    with pytest.raises(OptionError, match="has no token that a text begins with; give prompts to go on from"):
        task_data("self:4", None, "sea", tales / "base", writing=Writing(lambda: weights(tales / "sea")))
