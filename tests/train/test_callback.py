"""`FoldCallback` in a real `transformers.Trainer`: a run becomes an arrival, with its moments, through the gate."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import mergeway as mw
from mergeway.train.optimiser import read_optimiser

pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
SIZE = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}


class Rows(torch.utils.data.Dataset):
    """Eight rows of random tokens whose first token says the class."""

    def __init__(self, classes: int, seed: int) -> None:
        ids = torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(seed))
        self.rows = [{"input_ids": row, "labels": row[0] % classes} for row in ids]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return self.rows[k]


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(num_labels=2, **SIZE)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def trainer(base, out, *, classes=2, epochs=2, seed=1, callbacks=(), **options) -> Trainer:
    model = BertForSequenceClassification.from_pretrained(base, num_labels=classes, ignore_mismatched_sizes=True)
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": epochs, "save_strategy": "epoch"}
    settings |= {"logging_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": seed, "use_cpu": True}
    arguments = TrainingArguments(str(out), **settings, **options)
    return Trainer(model, arguments, train_dataset=Rows(classes, seed), callbacks=list(callbacks))


@pytest.mark.filterwarnings("ignore")
def test_the_last_save_is_folded_and_logged(base, tmp_path):
    trunk = mw.Trunk.create(tmp_path / "trunk", base, "fisher")
    run = trainer(base, tmp_path / "colour", classes=3)
    fold = mw.integrations.FoldCallback(trunk.path, weight=2.0, trainer=run)
    run.add_callback(fold)
    run.train()
    [_, record] = trunk.log()
    assert (record.task, record.weight, record.source) == ("colour", 2.0, str(tmp_path / "colour" / "checkpoint-4"))
    assert fold.record == record and fold.refused is None
    # The moments are those of the optimiser, and beside the checkpoint.
    stored = mw.Trunk.open(trunk.path)
    found = read_optimiser(tmp_path / "colour" / "checkpoint-4")
    assert (tmp_path / "colour" / "checkpoint-4" / "moments.safetensors").exists() and found.step == 4
    logged = [row for row in run.state.log_history if "mergeway/step" in row]
    assert [(row["mergeway/step"], row["mergeway/arrivals"], row["mergeway/refused"]) for row in logged] == [(1, 1, 0)]
    # The trunk holds what was trained: one arrival alone is the model itself, with its head of three classes.
    stored.export(tmp_path / "out", task="colour")
    exported = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_every_save_takes_the_place_of_the_one_before(base, tmp_path):
    trunk = mw.Trunk.create(tmp_path / "trunk", base, "average", keep=3)
    run = trainer(base, tmp_path / "run", epochs=2)
    run.add_callback(mw.integrations.FoldCallback(trunk, every_save=True))
    run.train()
    assert [record.kind for record in trunk.log()] == ["init", "add", "rollback", "add"]
    [held] = trunk.folded()
    assert held.source.endswith("checkpoint-4")
    history = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert any("mergeway/step" in row for row in history)


class Listener(TrainerCallback):
    """Stands for MLflow, W&B or TensorBoard: whatever the Trainer reports to hears it by `on_log`."""

    def __init__(self) -> None:
        self.heard = []

    def on_log(self, args, state, control, logs=None, **_):
        self.heard.append({k: v for k, v in logs.items() if k.startswith("mergeway/")})


@pytest.mark.filterwarnings("ignore")
def test_the_gate_is_honoured_and_logged(base, tmp_path):
    """Every sentence is in the data with both labels, so that any model is right in half of them."""
    words = {f"w{k}": k for k in range(16)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w0").save_pretrained(base)
    rows = [{"text": f"w{k} w{k + 1}", "label": label} for k in range(1, 9) for label in (0, 1)]
    trunk = mw.Trunk.create(tmp_path / "trunk", base, "average")
    listener, folds = Listener(), []
    for seed, (task, least) in enumerate((("first", 50.0), ("second", 60.0))):
        run = trainer(base, tmp_path / task, epochs=1, seed=seed, callbacks=[listener])
        check = dict.fromkeys(("first", task), rows)
        folds.append(mw.integrations.FoldCallback(trunk, trainer=run, check=check, at_least={task: least}))
        run.add_callback(folds[-1])
        run.train()
    taken, refused = folds
    assert taken.refused is None and trunk.log()[-1] == taken.record
    assert refused.record is None and "'second' would be at 50.00 %" in str(refused.refused)
    first, second = [row for row in listener.heard if row]
    assert first == {
        "mergeway/refused": 0,
        "mergeway/step": 1,
        "mergeway/arrivals": 1,
        "mergeway/accuracy/first": 50,
    }
    # What is deployed after a refusal is what was deployed before it.
    offered = {"mergeway/offered/first": 50, "mergeway/offered/second": 50}
    assert second == {"mergeway/refused": 1, "mergeway/accuracy/first": 50, **offered}


def test_a_run_that_saves_nothing_is_a_mistake(base, tmp_path):
    run = trainer(base, tmp_path / "run")
    run.args.save_strategy = "no"
    trunk = mw.Trunk.create(tmp_path / "trunk", base, "average")
    with pytest.raises(mw.MergewayError, match="save_strategy is 'no'"):
        mw.integrations.FoldCallback(trunk).on_train_begin(run.args, run.state, run.control)
