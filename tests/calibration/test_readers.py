"""Reading labelled data in every form, and what is said about data that does not fit."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import save_file

from mergeway.calibration.readers import read_data, read_head
from mergeway.calibration.samples import UNKNOWN
from mergeway.calibration.task_data import task_data
from mergeway.errors import OptionError
from mergeway.model.kinds import kind_of, make_model

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, tiny.SIDE, tiny.SIDE, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


HEAD = torch.eye(tiny.CLASSES, tiny.WIDTH)


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def same_images(samples) -> None:
    assert np.array_equal(samples.inputs["images"].numpy(), IMAGES)
    assert samples.labels.tolist() == LABELS.tolist()


# --- forms of data ----------------------------------------------------------------------------------------------------


def test_npz_with_a_split(vision, tmp_path):
    other = RNG.integers(0, 256, IMAGES.shape, dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=IMAGES, y_train=LABELS, x_test=other, y_test=LABELS)
    same_images(read_data(tmp_path / "a.npz", "t", HEAD, vision.model))


def test_npz_without_a_split(vision, tmp_path):
    np.savez(tmp_path / "a.npz", x=IMAGES, y=LABELS.astype(np.uint8))
    same_images(read_data(tmp_path / "a.npz", "t", HEAD, vision.model))


@pytest.mark.parametrize("shape", [(6, tiny.SIDE, tiny.SIDE), (6, tiny.SIDE, tiny.SIDE, 1)])
def test_npz_of_grey_images(vision, tmp_path, shape):
    grey = IMAGES[..., 0].reshape(shape)
    np.savez(tmp_path / "a.npz", x=grey, y=LABELS)
    images = read_data(tmp_path / "a.npz", "t", HEAD, vision.model).inputs["images"].numpy()
    assert images.shape == IMAGES.shape
    assert all(np.array_equal(images[..., c], IMAGES[..., 0]) for c in range(3))


def test_folder_of_images(vision, tmp_path):
    """One folder a class in the order of their names; other files are passed over."""
    for k, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        folder = tmp_path / "data" / f"class-{'abc'[label]}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k}.png").write_bytes(png(image))
        (folder / "notes.txt").write_text("not an image")
    samples = read_data(tmp_path / "data", "t", HEAD, vision.model)
    order = np.argsort(LABELS, kind="stable")
    assert np.array_equal(samples.inputs["images"].numpy(), IMAGES[order])
    assert samples.labels.tolist() == LABELS[order].tolist()


def test_images_are_resized(vision, tmp_path):
    (tmp_path / "data" / "a").mkdir(parents=True)
    Image.fromarray(np.full((32, 16), 77, np.uint8)).save(tmp_path / "data" / "a" / "grey.png")
    samples = read_data(tmp_path / "data", "t", HEAD[:1], vision.model)
    assert samples.inputs["images"].shape == (1, tiny.SIDE, tiny.SIDE, 3)
    assert samples.inputs["images"].unique().tolist() == [77]


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_of_images(vision, tmp_path, nested):
    """Encoded bytes, by themselves or in a struct with their path, as the datasets library writes them."""
    encoded = [png(image) for image in IMAGES]
    column = [{"bytes": b, "path": None} for b in encoded] if nested else encoded
    table = pyarrow.table({"image": column, "label": LABELS})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    same_images(read_data(tmp_path / "a.parquet", "t", HEAD, vision.model))


def test_text_from_jsonl_and_parquet(text, tmp_path):
    texts, labels = ["the red dog", "a blue cat sings", "green"], [0, 1, 2]
    lines = [json.dumps({"text": t, "label": y}) for t, y in zip(texts, labels, strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": labels}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        samples = read_data(tmp_path / name, "t", HEAD, text.model)
        assert samples.labels.tolist() == labels
        assert samples.inputs["attention_mask"].sum(1).tolist() == [3, 4, 1]
        words = {w: k + 2 for k, w in enumerate(tiny.WORDS)}
        assert samples.inputs["input_ids"][1].tolist() == [*(words[w] for w in texts[1].split()), 0, 0, 0, 0]


def test_images_without_labels(vision, tmp_path):
    """Arrays without y, a folder without class folders, a table without the column."""
    np.savez(tmp_path / "a.npz", x=IMAGES)
    np.savez(tmp_path / "b.npz", x_train=IMAGES, x_test=IMAGES[:2], y_test=LABELS[:2])
    table = pyarrow.table({"image": [png(image) for image in IMAGES]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "folder" / "empty").mkdir(parents=True)
    for k, image in enumerate(IMAGES):
        (tmp_path / "folder" / f"{k}.png").write_bytes(png(image))
    for name in ("a.npz", "b.npz", "a.parquet", "folder"):
        samples = read_data(tmp_path / name, "t", HEAD, vision.model)
        assert np.array_equal(samples.inputs["images"].numpy(), IMAGES)
        assert samples.labels.tolist() == [UNKNOWN] * 6 and samples.labels.dtype is torch.int64
        assert not samples.labelled


def test_texts_without_labels(text, tmp_path):
    texts = ["the red dog", "a blue cat sings", "green"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        samples = read_data(tmp_path / name, "t", HEAD, text.model)
        assert samples.labels.tolist() == [UNKNOWN] * 3
        assert samples.inputs["attention_mask"].sum(1).tolist() == [3, 4, 1]


def test_data_of_a_suite(vision):
    """SUITE#TASK brings head and settings; without #TASK the arrival's own name decides."""
    model, samples = task_data(f"{vision.path}#bees", None, "other", vision.base)
    assert samples.task == "other"
    assert torch.equal(samples.labels, vision.samples("bees", "train").labels)
    assert model.settings["kind"] == "clip-vision"
    assert model.settings["logit_scale"] == tiny.SCALE
    assert torch.equal(
        task_data(str(vision.path), None, "cats", vision.base)[1].head, vision.samples("cats", "test").head
    )


# --- how a base reads its inputs --------------------------------------------------------------------------------------


def test_settings_of_a_vision_base(vision, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(vision.base, base)
    save_file({"weight": HEAD}, tmp_path / "head.safetensors")
    plain = kind_of(base, tmp_path / "head.safetensors")
    assert plain["kind"] == "clip-vision"
    assert plain["logit_scale"] == 100
    (base / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}))
    save_file({"weight": HEAD, "logit_scale": torch.tensor(14.0)}, tmp_path / "head.safetensors")
    told = kind_of(base, tmp_path / "head.safetensors")
    assert told == {
        "kind": "clip-vision",
        "logit_scale": 14.0,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [1, 2, 3],
    }
    assert make_model(base, told).scale == 14


def test_settings_of_a_text_base(text, tmp_path):
    save_file({"weight": HEAD}, tmp_path / "head.safetensors")
    assert kind_of(text.base, tmp_path / "head.safetensors")["kind"] == "text-encoder"


def test_a_base_without_a_ready_made_objective(vision, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"weight": HEAD}, tmp_path / "head.safetensors")
    with pytest.raises(OptionError, match=r"type 'llama' has no ready-made objective; .*objective=FUNCTION"):
        kind_of(base, tmp_path / "head.safetensors")


# --- mistakes, through the command line -------------------------------------------------------------------------------


@pytest.fixture
def adding(vision, tmp_path, call, snapshot):
    """Runs `add` with data that is wrong: one line, and the trunk as it was."""
    save_file({"weight": HEAD}, tmp_path / "head.safetensors")
    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", vision.base, "--rule", "ode").ok()

    def add(data, head=tmp_path / "head.safetensors", *more) -> str:
        before = snapshot(trunk)
        words = ["--data", data] * (data is not None) + ["--head", head] * (head is not None)
        said = call("add", trunk, vision.task("ants").expert, *words, *more).mistake()
        assert {k: v for k, v in snapshot(trunk).items() if not k.endswith("lock")} == {
            k: v for k, v in before.items() if not k.endswith("lock")
        }
        return said

    return add


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": IMAGES, "y": LABELS + 1}, "label 3 is out of range; the head has 3 classes, 0 to 2"),
        ({"x": IMAGES, "y": LABELS - 1}, "label -1 is out of range"),
        ({"x": IMAGES[:, :4], "y": LABELS}, "the images are uint8 [6, 4, 8, 3]; the model takes uint8 [n, 8, 8, 3]"),
        ({"x": IMAGES.transpose(0, 3, 1, 2), "y": LABELS}, "the images are uint8 [6, 3, 8, 8]"),
        ({"x": IMAGES / 255, "y": LABELS}, "the images are float64"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, "there are no samples"),
        ({"x": IMAGES, "y": LABELS[:5]}, "6 rows of 'images' for 5 labels"),
        ({"x": IMAGES, "y": LABELS + 0.5}, "labels are float64"),
        ({"x": IMAGES, "y": np.where(LABELS == 0, -1, LABELS)}, "label -1 is out of range"),
        ({"y": LABELS}, "has no array 'x_train'; it holds y"),
        ({"images": IMAGES}, "it holds images"),
        ({"x": np.array(["a"] * 6), "y": LABELS}, "the images are <U1"),
    ],
)
def test_arrays_that_do_not_fit(adding, tmp_path, arrays, said):
    assert said in adding(npz(tmp_path / "bad.npz", **arrays))


def test_data_that_is_not_there(adding, tmp_path):
    assert "no such file or directory" in adding(tmp_path / "nothing.npz")
    assert "needs calibration data: give --data and --head" in adding(None, None)
    good = npz(tmp_path / "good.npz", x=IMAGES, y=LABELS)
    assert "the task's head is needed too; give --head FILE" in adding(good, None)
    assert "nowhere" in adding(good, tmp_path / "nowhere.safetensors")


def test_heads_that_do_not_fit(adding, tmp_path):
    good = npz(tmp_path / "good.npz", x=IMAGES, y=LABELS)
    for tensors, said in (
        ({"weight": torch.zeros(3, 5)}, "the head is [3, 5]; the model's features have width 8"),
        ({"weight": torch.zeros(8)}, "the head is [8]"),
        ({"bias": torch.zeros(3)}, "a head holds a tensor 'weight'; this file holds bias"),
    ):
        save_file(tensors, tmp_path / "odd.safetensors")
        assert said in adding(good, tmp_path / "odd.safetensors")
    save_file({"weight": torch.full((3, 8), float("nan"))}, tmp_path / "odd.safetensors")
    assert "not finite" in adding(good, tmp_path / "odd.safetensors")


def test_files_that_are_no_data(adding, tmp_path):
    for name, content, said in (
        ("a.npz", b"PK\x03\x04 not really", "not a readable npz file"),
        ("b.npz", b"", "not a readable npz file"),
        ("a.parquet", b"PAR1 no", "not a readable parquet file"),
        ("a.csv", b"x,y", "data is an .npz, .parquet or .jsonl file, or a folder"),
        ("a.jsonl", b'{"text": "a", "label": 0}\n', "holds text, but the base is not a text encoder"),
    ):
        (tmp_path / name).write_bytes(content)
        assert said in adding(tmp_path / name)
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=LABELS)
    assert "not a readable npz file" in adding(tmp_path / "objects.npz")


def test_folders_that_do_not_fit(adding, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no images; expected one folder a class" in adding(tmp_path / "empty")
    (tmp_path / "two" / "a").mkdir(parents=True)
    (tmp_path / "two" / "b").mkdir()
    (tmp_path / "two" / "a" / "x.png").write_bytes(png(IMAGES[0]))
    assert "2 class folders, but the head has 3 classes" in adding(tmp_path / "two")
    (tmp_path / "two" / "z.png").write_bytes(png(IMAGES[0]))
    assert "1 images without a label beside 2 class folders; label all images or none" in adding(tmp_path / "two")
    (tmp_path / "two" / "z.png").unlink()
    (tmp_path / "two" / "c").mkdir()
    (tmp_path / "two" / "c" / "y.png").write_bytes(b"no picture")
    assert "holds something that is not an image" in adding(tmp_path / "two")


def test_tables_that_do_not_fit(adding, tmp_path):
    for columns, said in (
        ({"picture": [1], "label": [0]}, "has no column 'image'; it has picture, label"),
        (
            {"image": [png(IMAGES[0])] * 2, "label": [1, None]},
            "a label is None; labels are whole numbers, or there is no",
        ),
        ({"image": [None], "label": [0]}, "not an image"),
        ({"image": [{"path": "x"}], "label": [0]}, "not an image"),
        ({"image": [png(IMAGES[0])], "label": ["dog"]}, "a label is 'dog'; labels are whole numbers"),
        ({"image": [png(IMAGES[0])], "label": [None]}, "a label is None"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        assert said in adding(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json\n", "line 1: expected an object with 'text' and an integer 'label'"),
        (
            '{"text": "a", "label": 0}\n{"text": "b"}\n',
            "line 2: has no label, and the first has one; label all or none",
        ),
        (
            '{"text": "a"}\n{"text": "b", "label": 0}\n',
            "line 2: has a label, and the first has none; label all or none",
        ),
        ('{"text": "a", "label": null}\n', "line 1: expected"),
        ('{"text": "a", "label": "dog"}\n', "line 1"),
        ('{"text": "a", "label": 1.5}\n', "line 1"),
        ("[1]\n", "line 1"),
        ("", "there are no samples"),
        ('{"text": "a", "label": 7}\n', "label 7 is out of range"),
    ],
)
def test_lines_that_are_no_samples(text, tmp_path, content, said):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(OptionError, match=said):
        read_data(tmp_path / "a.jsonl", "t", HEAD, text.model)


def test_text_that_is_no_utf8(text, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff", "label": 0}\n')
    with pytest.raises(OptionError, match="UTF-8"):
        read_data(tmp_path / "a.jsonl", "t", HEAD, text.model)


def test_images_for_a_text_encoder(text, tmp_path):
    for data in (npz(tmp_path / "a.npz", x=IMAGES, y=LABELS), tmp_path):
        with pytest.raises(OptionError, match="holds images, but the base is a text encoder"):
            read_data(data, "t", HEAD, text.model)


def test_a_head_is_read_in_float32(tmp_path):
    save_file({"weight": HEAD.bfloat16()}, tmp_path / "head.safetensors")
    head = read_head(tmp_path / "head.safetensors", tiny.WIDTH)
    assert head.dtype == torch.float32
    assert torch.equal(head, HEAD)


# --- suites that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("kind"), "the entry 'kind' is missing"),
        (lambda s: s.update(kind="clip-visoin"), "did you mean 'clip-vision'"),
        (lambda s: s.pop("image_mean"), "needs the entry 'image_mean'"),
        (lambda s: s.update(tasks=[]), "at least one task"),
        (lambda s: s["tasks"].append(s["tasks"][0]), "two tasks have the name 'ants'"),
        (lambda s: s["tasks"][1].pop("head"), "task 1 has no text entry 'head'"),
        (lambda s: s["tasks"][1].update(expert="gone"), "of task 'bees' does not exist"),
        (lambda s: s.update(base="gone"), "does not exist"),
        (lambda s: s["tasks"].append(3), "task 3 is not an object"),
    ],
)
def test_descriptions_that_do_not_fit(vision, tmp_path, call, change, said):
    shutil.copytree(vision.path, tmp_path / "suite")
    settings = json.loads((tmp_path / "suite" / "suite.json").read_text())
    change(settings)
    (tmp_path / "suite" / "suite.json").write_text(json.dumps(settings))
    assert said in call("evaluate", vision.base, "--suite", tmp_path / "suite").mistake()


def test_no_suite(vision, call, tmp_path):
    assert "not a suite (no suite.json)" in call("evaluate", vision.base, "--suite", tmp_path).mistake()
    (tmp_path / "suite.json").write_text("{")
    assert "suite.json" in call("evaluate", vision.base, "--suite", tmp_path).mistake()
