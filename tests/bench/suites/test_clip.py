"""CLIP suites by name, offline, on a hub cache that the test lays out itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import hubcache
import numpy as np
import pytest
import torch

from mergeway.bench.recommended import recommended
from mergeway.bench.suite import load_suite
from mergeway.bench.suites import check_suite, named
from mergeway.bench.suites.datasets import known_datasets
from mergeway.bench.suites.named import BACKBONES, CLIP_TASKS, Recipe, recipes, write_recipe
from mergeway.train import Training, finetune

BACKBONE = BACKBONES["b32"]
TASKS = ("mnist", "fer2013", "food101")  # usual columns, other columns, another test split
RECIPE = Recipe("clip-three", "task", BACKBONE, TASKS, 3)


@pytest.fixture(scope="module")
def hub():
    """Base, three experts and three datasets in the cache; what is in them, for the test to compute with by itself."""
    model = hubcache.clip_model(BACKBONE)
    towers, data = {}, {}
    for number, task in enumerate(TASKS):
        towers[task] = hubcache.clip_tower(f"tanganke/clip-vit-base-patch32_{task}", model, number)
        reading = known_datasets()[task].reading
        columns = (reading.get("image", "image"), reading.get("label", "label"))
        splits = {reading.get("train", "train"): 12, reading.get("test", "test"): 15}
        classes = len(known_datasets()[task].classes)
        data[task] = hubcache.dataset(reading["dataset"], splits, min(classes, 7), number, columns)[
            reading.get("test", "test")
        ]
    return model, towers, data


@pytest.fixture(scope="module")
def suite(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    write_recipe(RECIPE, folder)
    return load_suite(folder)


def plain_head(model, task):
    """The zero-shot head, one prompt at a time."""
    from transformers import CLIPTokenizerFast

    tokenizer = CLIPTokenizerFast.from_pretrained(BACKBONE)
    rows = []
    for name in known_datasets()[task].classes:
        vectors = []
        for template in known_datasets()[task].templates:
            made = tokenizer([template.replace("{}", name)], return_tensors="pt", truncation=True)
            with torch.no_grad():
                out = model.text_projection(model.text_model(**made).pooler_output)[0].double().numpy()
            vectors.append(out / np.linalg.norm(out))
        mean = np.mean(vectors, axis=0)
        rows.append(mean / np.linalg.norm(mean))
    return np.array(rows)


def plain_accuracy(model, tower, task, data):
    """The library's own processor and towers; cosine in NumPy."""
    from transformers import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil.from_pretrained(BACKBONE)
    before = {n: t.clone() for n, t in model.vision_model.state_dict().items()}
    model.vision_model.load_state_dict(tower, strict=False)
    pictures, labels = data
    pixels = torch.cat([processor(p, return_tensors="pt")["pixel_values"] for p in pictures])
    with torch.no_grad():
        found = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output).double().numpy()
    model.vision_model.load_state_dict(before)
    found /= np.linalg.norm(found, axis=-1, keepdims=True)
    answers = (found @ plain_head(model, task).T).argmax(-1)
    return pytest.approx(
        100 * np.mean(answers == np.array(labels)), abs=1e-4
    )  # the matrices are written to four places


def test_experts_were_trained_as_opcm_says(suite):
    """Appendix B: Adam, cosine from 1e-5, 4000 steps of 128, heads and projection as they are; nothing of a warm-up, a decay or a clip."""
    training = recommended(suite, "training", Training, {})
    assert (training.total_steps(10**6), training.batch, training.weight_decay, training.warmup) == (4000, 128, 0, 0)
    assert [training.rate(step, 4000) for step in (0, 2000, 4000)] == pytest.approx([1e-5, 5e-6, 0])
    assert training.clip > 1000
    start = finetune(suite, "mnist", training=Training(steps=1, lr=0.0)).params
    tuned = finetune(suite, "mnist", training=replace(training, steps=1, batch=4)).params
    moved = {n for n in tuned if not torch.equal(tuned[n], start[n])}
    assert moved and "visual_projection.weight" not in moved


def test_heads_are_averaged_prompts(hub, suite):
    for task in suite.tasks:
        head = suite.samples(task.name, "test").head
        np.testing.assert_allclose(head.numpy(), plain_head(hub[0], task.name), atol=1e-5)


def test_pictures_are_those_of_the_processor(hub, suite):
    from transformers import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil.from_pretrained(BACKBONE)
    seen = suite.samples("mnist", "test").loaded().inputs["images"]
    for pixels, picture in zip(seen, hub[2]["mnist"][0], strict=True):
        wanted = processor(picture, return_tensors="pt", do_normalize=False)["pixel_values"][0]
        torch.testing.assert_close(pixels.permute(2, 0, 1).float() / 255, wanted, atol=1e-6, rtol=0)


def test_bench_over_three_tasks_and_two_rules(hub, suite, call, tmp_path):
    """Base, experts and both rules' accuracy matrices, against folds and answers computed here."""
    model, towers, data = hub
    out = tmp_path / "run"
    call("bench", suite.path, "--rules", "average,task-arithmetic:scaling=0.4", "--orders", 2, "--out", out).ok()
    base = {n: t.double() for n, t in model.vision_model.state_dict().items() if t.is_floating_point()}
    ends = json.loads((out / "ends.json").read_text())
    for task in TASKS:
        assert ends["base"][task] == plain_accuracy(model, base, task, data[task])
        assert ends["experts"][task] == plain_accuracy(model, towers[task], task, data[task])
    assert any(accuracy > 0 for side in ends.values() for accuracy in side.values())
    folders = sorted((out / "matrices").iterdir())
    assert len(folders) == 4
    for file in folders:
        header, *lines = [line.split(",") for line in file.read_text().splitlines()]
        order = header[1:]
        for k, line in enumerate(lines, 1):
            moved = [{n: towers[t][n].double() - base[n] for n in base} for t in order[:k]]
            share = 1 / k if file.name.startswith("average") else 0.4
            merged = {n: (base[n] + share * sum(d[n] for d in moved)).float() for n in base}
            wanted = [plain_accuracy(model, merged, t, data[t]) for t in order[:k]]
            assert [float(a) for a in line[1 : k + 1]] == wanted


def test_evaluate_and_check(hub, suite, call):
    _, towers, data = hub
    told = call("evaluate", suite.task("mnist").expert, "--suite", suite.path, "--json").json()
    assert told["tasks"]["mnist"] == plain_accuracy(hub[0], towers["mnist"], "mnist", data["mnist"])
    assert [row["test"] for row in check_suite(suite.path)] == [15, 15, 15]


def test_nothing_is_made_twice(hub, suite, tmp_path):
    first = [(t.head, t.head.stat().st_mtime_ns, t.expert) for t in suite.tasks]
    write_recipe(RECIPE, tmp_path)
    again = load_suite(tmp_path)
    assert [(t.head, t.head.stat().st_mtime_ns, t.expert) for t in again.tasks] == first


def test_names_and_datasets_of_the_protocol():
    every = recipes()
    assert {f"clip-vit-{b}-{n}" for b in ("b32", "b16", "l14") for n in (8, 14, 20)} <= every.keys()
    assert every["clip-vit-l14-14"].datasets == CLIP_TASKS[:14]
    counts = [len(known_datasets()[t].classes) for t in CLIP_TASKS]
    assert counts == [397, 196, 45, 10, 10, 43, 10, 47, 102, 2, 7, 37, 10, 100, 10, 101, 10, 26, 10, 2]
    assert all("{}" in template for k in known_datasets().values() for template in k.templates)


def test_missing_snapshots_name_the_download(hub, call):
    said = call("bench", "clip-vit-b32-8", "--rules", "average").mistake()
    assert "hf download tanganke/clip-vit-base-patch32_sun397" in said
    assert "hf download openai/clip-vit-large-patch14" in call("bench", "clip-vit-l14-8").mistake()
    assert "did you mean 'clip-vit-b32-8'" in call("bench", "clip-vit-b32-9").mistake()


def test_missing_dataset_names_the_download(hub, suite, call, tmp_path):
    shutil.copytree(suite.path, tmp_path / "copy")
    said = {"dataset": "nobody/nothing"}
    (tmp_path / "copy" / "data" / "mnist.json").write_text(json.dumps(said))
    line = call("suites", "check", tmp_path / "copy").mistake()
    assert "hf download --repo-type dataset nobody/nothing" in line
    (tmp_path / "copy" / "data" / "mnist.json").write_text(json.dumps(said | {"columm": "x"}))
    assert "unknown entries columm" in call("suites", "check", tmp_path / "copy").mistake()


def test_calibration_reads_the_rows_it_needs(suite, call, tmp_path):
    """A rule that needs data works on rows that are decoded when looked at."""
    words = ("--rules", "ode:step=0.25", "--orders", 1, "--samples", 9, "--json")
    assert call("bench", suite.path, *words).json()["rows"][0]["gradients"] > 0
    assert named("digits").exists()
