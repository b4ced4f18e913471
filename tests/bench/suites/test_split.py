"""Class- and domain-incremental suites: how data are cut, and how a model is judged among all classes seen so far."""

from __future__ import annotations

import json

import hubcache
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from mergeway.bench.suite import load_suite
from mergeway.bench.suites import check_suite, split_suite
from mergeway.bench.suites.datasets import known_datasets
from mergeway.bench.suites.named import BACKBONES, Recipe, recipes, write_recipe
from mergeway.bench.suites.orders import class_order, domain_order
from mergeway.bench.suites.split import class_parts, domain_parts

CLASSES, RNG = 6, np.random.default_rng(0)


def arrays(count):
    x = RNG.integers(0, 256, (count, tiny.SIDE, tiny.SIDE, 3), dtype=np.uint8)
    return x, np.arange(count) % CLASSES, np.array(["ink", "chalk", "oil"])[np.arange(count) // 2 % 3]


TRAIN, TEST = arrays(36), arrays(30)


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    """The base of a tiny suite, and the suite for its experts."""
    return load_suite(tiny.vision_suite(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "all.npz"
    parts = {f"{k}_{s}": v for s, rows in (("train", TRAIN), ("test", TEST)) for k, v in zip("xyd", rows, strict=True)}
    np.savez(file, **parts)
    return file


@pytest.fixture(scope="module")
def experts(tower, tmp_path_factory):
    """Experts under the names of the split's tasks."""
    folder = tmp_path_factory.mktemp("experts")
    for name, task in zip(("0-1", "2-3", "4-5"), tower.tasks, strict=True):
        (folder / name).symlink_to(task.expert)
    return folder


def features(tower, x, params):
    """Image features by the model itself, in NumPy from there."""
    model = tower.model.module
    config = json.loads((tower.base / "config.json").read_text())
    assert config["image_size"] == tiny.SIDE
    mean, std = (
        torch.tensor(v).view(3, 1, 1)
        for v in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    )
    before = {n: t.clone() for n, t in model.state_dict().items()}
    model.load_state_dict(params)
    with torch.no_grad():
        out = model(pixel_values=(torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 - mean) / std).image_embeds
    model.load_state_dict(before)
    out = out.double().numpy()
    return out / np.linalg.norm(out, axis=-1, keepdims=True)


def class_means(tower, params, rows, classes=CLASSES):
    x, y, _ = rows
    found = features(tower, x, params)
    means = np.stack([found[y == c].mean(0) if (y == c).any() else np.zeros(found.shape[1]) for c in range(classes)])
    return means / np.maximum(np.linalg.norm(means, axis=-1, keepdims=True), 1e-12)


def answers(tower, params, head, rows, allowed):
    scores = features(tower, rows[0], params) @ head.T
    scores[:, [c for c in range(len(head)) if c not in allowed]] = -np.inf
    return scores.argmax(-1)


def test_chunks_are_contiguous_in_a_fixed_order():
    assert [p.labels for p in class_parts(6, 3)] == [[0, 1], [2, 3], [4, 5]]
    assert [p.name for p in class_parts(10, 5)] == ["0-1", "2-3", "4-5", "6-7", "8-9"]
    shuffled = [c for p in class_parts(100, 7, seed=3) for c in p.labels]
    assert sorted(shuffled) == list(range(100)) != shuffled
    assert shuffled == [c for p in class_parts(100, 20, seed=3) for c in p.labels]
    assert {len(p.labels) for p in class_parts(100, 7)} == {14, 15}
    # As the released code cuts 196 cars: each chunk from floor(39.2 i) to floor(39.2 (i + 1)).
    assert [len(p.labels) for p in class_parts(196, 5)] == [39, 39, 39, 39, 40]
    assert [p.labels for p in class_parts(4, 2, order=[3, 0, 2, 1])] == [[3, 0], [2, 1]]


def test_class_incremental_suite(tower, data, call, tmp_path):
    words = ("suites", "split", data, "--base", tower.base, "--tasks", 3, "--out", tmp_path / "cil")
    assert call(*words, "--json").json()["protocol"] == "cil"
    rows = check_suite(tmp_path / "cil")
    assert [(r["task"], r["classes"], r["train"], r["test"]) for r in rows] == [
        (n, 2, 12, 10) for n in ("0-1", "2-3", "4-5")
    ]
    suite = load_suite(tmp_path / "cil")
    assert set(suite.samples("2-3", "test").labels.tolist()) == {2, 3}
    base = load_file(tower.base / "model.safetensors")
    np.testing.assert_allclose(
        load_file(tmp_path / "cil" / "head.safetensors")["weight"], class_means(tower, base, TRAIN), atol=1e-5
    )


@pytest.mark.parametrize("classifier", ["head", "nearest-mean"])
def test_bench_is_task_agnostic(tower, data, experts, call, tmp_path, classifier):
    """Every entry of the accuracy matrix: the choice is among the classes seen so far, whatever task an image is from."""
    out, cil = tmp_path / "run", tmp_path / "cil"
    given = ("--experts", experts, "--classifier", classifier)
    call("suites", "split", data, "--base", tower.base, "--tasks", 3, "--out", cil, *given).ok()
    told = call("bench", cil, "--rules", "average", "--orders", 1, "--out", out, "--json").json()
    header, *lines = [line.split(",") for line in (out / "matrices" / "average.3.0.csv").read_text().splitlines()]
    order, owned = header[1:], {"0-1": [0, 1], "2-3": [2, 3], "4-5": [4, 5]}
    base = load_file(tower.base / "model.safetensors")
    frozen = class_means(tower, base, TRAIN)
    loaded = {n: load_file(experts / n / "model.safetensors") for n in order}
    final = []
    for k, line in enumerate(lines, 1):
        merged = {n: torch.stack([loaded[t][n].double() for t in order[:k]]).mean(0).float() for n in base}
        seen = [c for t in order[:k] for c in owned[t]]
        rows = np.isin(TRAIN[1], seen)
        head = frozen if classifier == "head" else class_means(tower, merged, [v[rows] for v in TRAIN])
        guessed = answers(tower, merged, head, TEST, seen)
        final = [100 * np.mean(guessed[m] == TEST[1][m]) for t in order[:k] for m in [np.isin(TEST[1], owned[t])]]
        assert [float(a) for a in line[1 : k + 1]] == pytest.approx(final, abs=1e-3)
    assert told["rows"][0]["acc"] == pytest.approx(np.mean(final))  # A_N


def test_domain_incremental_suite(tower, data, tmp_path):
    split_suite(str(data), tmp_path / "dil", tower.base, by="domains", domain="d")
    suite = load_suite(tmp_path / "dil")
    assert [t.name for t in suite.tasks] == ["chalk", "ink", "oil"]
    params = load_file(tower.base / "model.safetensors")
    guessed = answers(tower, params, class_means(tower, params, TRAIN), TEST, range(CLASSES))
    wanted = [100 * np.mean((guessed == TEST[1])[TEST[2] == t.name]) for t in suite.tasks]
    assert suite.accuracies(params, [t.name for t in suite.tasks]) == pytest.approx(wanted)


def test_folders_tables_and_the_hub_are_cut_alike(tower, tmp_path):
    """The same pictures as class folders, as a parquet file and as a dataset give the same classes and counts."""
    for row, (x, y) in enumerate(zip(TRAIN[0], TRAIN[1], strict=True)):
        place = tmp_path / "folder" / f"class-{y}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{row:02}.png").write_bytes(hubcache.png(x))
    hubcache.dataset("org/drawn", {"train": 30, "test": 12}, 6, 0)
    found = hubcache.repository("org/drawn", "dataset") / "data" / "train-00000-of-00001.parquet"
    table = tmp_path / "all.parquet"
    table.write_bytes(found.read_bytes())
    for name, source, test in (("a", tmp_path / "folder", 7), ("b", table, 6), ("c", "org/drawn", 12)):
        split_suite(str(source), tmp_path / name, tower.base, tasks=2)
        rows = check_suite(tmp_path / name)
        assert [r["classes"] for r in rows] == [3, 3]
        assert sum(r["test"] for r in rows) == test


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tasks", "7"), "6 classes make 1 to 6 tasks"),
        (("--by", "class"), "did you mean 'classes'"),
        (("--by", "domains"), "has no array 'domain_train'"),
        (("--head", "nowhere.safetensors"), "no such file"),
        (("--classifier", "nearest"), "did you mean 'nearest-mean'"),
        (("--experts", "."), "has no expert of task"),
    ],
)
def test_mistakes_of_a_split(tower, data, call, tmp_path, words, said):
    assert said in call("suites", "split", data, "--base", tower.base, "--out", tmp_path / "out", *words).mistake()
    assert not (tmp_path / "out").exists()


def test_descriptions_that_make_no_sense(tower, data, call, tmp_path):
    split_suite(str(data), tmp_path / "s", tower.base, tasks=2)
    good = json.loads((tmp_path / "s" / "suite.json").read_text())

    def check(change):
        said = json.loads(json.dumps(good))
        change(said)
        (tmp_path / "s" / "suite.json").write_text(json.dumps(said))
        return call("suites", "check", tmp_path / "s").mistake()

    assert "protocol 'cli' is unknown" in check(lambda s: s.update(protocol="cli"))
    assert "class 0 is in" in check(lambda s: s["tasks"][1]["labels"].append(0))
    assert "needs 'labels'" in check(lambda s: s["tasks"][0].pop("labels"))
    assert "not among the labels" in check(lambda s: s["tasks"][0]["labels"].pop())
    other = functional.normalize(torch.randn(CLASSES, tiny.WIDTH), dim=-1)
    save_file({"weight": other}, tmp_path / "s" / "other.safetensors")
    assert "has one head" in check(lambda s: s["tasks"][0].update(head="other.safetensors"))
    (tmp_path / "s" / "suite.json").write_text(json.dumps(good))
    assert "comes without an expert" in call("bench", tmp_path / "s", "--rules", "average").mistake()


# --- suites of the hub by name ---------------------------------------------------------------------------------------


def test_named_suites_of_both_protocols(tmp_path):
    """One of each kind, offline: classes from a text column without a test split, and domains by a column."""
    backbone = BACKBONES["b16"]
    hubcache.clip_model(backbone, seed=5)
    words = ["cat", "dog", "fox", "hen"]
    more = {"class_name": lambda row: words[row % 4]}
    hubcache.dataset("axiong/imagenet-r", {"test": 40}, 4, 1, ("image", "number"), **more)
    write_recipe(Recipe("imagenet-r-2", "cil", backbone, ("imagenet-r",), 2), tmp_path / "cil")
    cil = load_suite(tmp_path / "cil")
    assert [(r["task"], r["classes"]) for r in check_suite(tmp_path / "cil")] == [("0-1", 2), ("2-3", 2)]
    every = [len(cil.samples(t.name, s)) for t in cil.tasks for s in ("train", "test")]
    assert sum(every) == 40
    assert sum(every[1::2]) == 8
    assert set(cil.samples("2-3", "train").labels.tolist()) == {2, 3}
    domains = {"domain": lambda row: "Real World" if row % 3 else "Art"}
    hubcache.dataset("flwrlabs/office-home", {"train": 30}, 3, 2, **domains)
    write_recipe(Recipe("office-home", "dil", backbone, ("office-home",)), tmp_path / "dil")
    assert [(r["task"], r["train"] + r["test"]) for r in check_suite(tmp_path / "dil")] == [
        ("Art", 10),
        ("Real-World", 20),
    ]
    dil = load_suite(tmp_path / "dil")
    params = load_file(dil.base / "model.safetensors")
    assert all(0 <= a <= 100 for a in dil.accuracies(params, ["Art", "Real-World"]))


def test_a_dataset_of_ones_own_where_none_is_known(call, tmp_path):
    hubcache.clip_model(BACKBONES["b16"], seed=5)
    assert "suites build office-31 --data ID" in call("bench", "office-31").mistake()
    hubcache.dataset("org/office", {"train": 30}, 3, 2, domain=lambda row: ("amazon", "dslr", "webcam")[row // 10])
    made = call("suites", "build", "office-31", "--data", "org/office", "--out", tmp_path / "o", "--json").json()
    assert [t["name"] for t in made["tasks"]] == ["amazon", "dslr", "webcam"]


def test_released_orders():
    """The first and the last classes of each by their names, as the released code has them, and every class once."""
    ends = {
        "cifar100": (["rose", "tractor", "boy", "bus"], ["bridge", "tank", "flatfish"]),
        "cub-200": (["American_Three_toed_Woodpecker", "Bay_breasted_Warbler"], ["Sooty_Albatross", "Brown_Creeper"]),
    }
    for name, (first, last) in ends.items():
        names = known_datasets()[name].classes
        order = class_order(name, len(names))
        assert sorted(order) == list(range(len(names)))
        assert [names[c] for c in order[: len(first)]] == first
        assert [names[c] for c in order[-len(last) :]] == last
    assert class_order("imagenet-r", 200) == class_order("cub-200", 200)
    assert class_order("imagenet-r", 40) == class_order("elsewhere", 40) == list(range(40))
    assert [p.name for p in domain_parts(["real", "Sketch", "oil", "clipart"], None, domain_order("domainnet"))] == [
        "clipart",
        "Sketch",
        "real",
        "oil",
    ]
    assert len(set(domain_order("imagenet-r-domains"))) == 15


def test_domains_by_the_names_of_the_picture_files(call, tmp_path):
    """ImageNet-R has no column for its renditions: a file is called art_7.jpg."""
    hubcache.clip_model(BACKBONES["b16"], seed=5)
    renditions = ("art", "cartoon", "tattoo", "toy")
    more = {"class_name": lambda row: "cat" if row < 60 else "dog"}
    hubcache.dataset("axiong/imagenet-r", {"test": 120}, 2, 1, ("image", "number"), **more)
    told = call("suites", "build", "imagenet-r-domains", "--out", tmp_path / "nameless").mistake()
    assert "no file names to tell it by" in told
    assert not (tmp_path / "nameless").exists()
    hubcache.dataset(
        "axiong/imagenet-r",
        {"test": 120},
        2,
        1,
        ("image", "number"),
        files=lambda row: f"{renditions[row % 4]}_{row}.jpg",
        **more,
    )
    made = call("suites", "build", "imagenet-r-domains", "--out", tmp_path / "r", "--json").json()
    assert [t["name"] for t in made["tasks"]] == ["tattoo", "art", "cartoon", "toy"]
    suite = load_suite(tmp_path / "r")
    assert suite.protocol == "dil"
    assert [sum(len(suite.samples(n, s)) for s in ("train", "test")) for n in renditions] == [30, 30, 30, 30]
    assert set(suite.samples("toy", "train").labels.tolist()) == {0, 1}


@pytest.mark.parametrize("name", [name for name, recipe in recipes().items() if recipe.protocol != "task"])
def test_every_incremental_suite_by_its_name(call, tmp_path, name):
    """Each as the hub has it, in miniature: all of its classes and domains, in the columns and splits that we say it has."""
    recipe = recipes()[name]
    known = known_datasets()[recipe.datasets[0]]
    classes = len(known.classes) if known.classes else 40
    reading, more = known.reading, {}
    if "file_prefix" in reading:
        more["files"] = lambda row: f"{('clipart', 'real', 'sketch')[row % 3]}_{row}.jpg"
    elif known.domain:
        more[known.domain] = lambda row: ("clipart", "real", "sketch")[row % 3]
    image, label = reading.get("image", "image"), reading.get("label", "label")
    if known.classes is None and label == "class_name":
        more[label], label = lambda row: f"word{row % classes:02}", "number"
    train = reading.get("train", "train")
    test = reading.get("test", "test")
    splits = {train: 5 * classes, test: 2 * classes} if test else {train: 15 * classes}
    hubcache.clip_model(recipe.backbone, seed=5)
    hubcache.dataset(reading["dataset"] or "org/own", splits, classes, 1, (image, label), **more)
    own = [] if reading["dataset"] else ["--data", "org/own"]
    call("suites", "build", name, *own, "--out", tmp_path / name).ok()
    rows = call("suites", "check", tmp_path / name, "--json").json()["tasks"]
    suite = load_suite(tmp_path / name)
    assert len(rows) == len(suite.tasks) == (recipe.tasks or 3)
    assert sum(row["train"] + row["test"] for row in rows) == sum(splits.values())
    assert sum(row["classes"] for row in rows) == classes * (3 if known.domain else 1)
    params = load_file(suite.base / "model.safetensors")
    assert 0 <= suite.accuracy(params, suite.tasks[-1].name) <= 100
