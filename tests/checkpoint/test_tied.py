"""Tied weights stay tied, however many of their names a checkpoint stores."""

from __future__ import annotations

import pytest
import torch
from shared import DATA_FREE, draw_tensors

import mergeway as mw
from mergeway.errors import CheckpointError

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EMBED: (12, 8), "layer.weight": (8, 8), "layer.bias": (8,)}


def model(seed: int, *, head: bool) -> dict[str, torch.Tensor]:
    tensors = draw_tensors(seed, SHAPES)
    return tensors | ({HEAD: tensors[EMBED].clone()} if head else {})


@pytest.fixture(params=DATA_FREE)
def rule(request) -> str:
    return request.param


@pytest.mark.parametrize("head", [True, False], ids=["both-names", "missing-alias"])
def test_both_names_of_the_base_stay_equal(rule, head):
    """Also by `randmix`, whose draws depend on the name, and by matrix rules, for which a head would be a matrix."""
    merged = mw.merge(model(0, head=True), [model(1, head=head), model(2, head=True)], rule)
    assert torch.equal(merged[HEAD], merged[EMBED])
    assert not torch.equal(merged[EMBED], model(0, head=True)[EMBED])


# Not OPCM and TIES, whose norms and thresholds run over every stored tensor.
@pytest.mark.parametrize("rule", [r for r in DATA_FREE if r not in ("opcm", "ties")])
def test_tying_does_not_change_the_embedding(rule):
    """The result is that of the base that stores the tensor once."""
    both = mw.merge(model(0, head=True), [model(1, head=True), model(2, head=True)], rule)
    once = mw.merge(model(0, head=False), [model(1, head=False), model(2, head=False)], rule)
    for name, tensor in once.items():
        assert torch.equal(both[name], tensor)


def test_an_extra_alias_is_not_an_error(rule):
    merged = mw.merge(model(0, head=False), [model(1, head=True)], rule)
    once = mw.merge(model(0, head=False), [model(1, head=False)], rule)
    assert merged.keys() == once.keys()
    for name in once:
        assert torch.equal(merged[name], once[name])


def test_an_untied_arrival_is_an_error():
    untied = model(1, head=True) | {HEAD: draw_tensors(5, {HEAD: (12, 8)})[HEAD]}
    with pytest.raises(CheckpointError, match=r"tied.*differ"):
        mw.merge(model(0, head=True), [untied])
    with pytest.raises(CheckpointError, match="unknown to the base"):
        mw.merge(model(0, head=False), [untied])


def test_a_missing_tensor_of_equal_constants_is_not_tied():
    """Two zero biases are no tie: an arrival without one of them is incomplete."""
    base = model(0, head=False) | {"a.bias": torch.zeros(8), "b.bias": torch.zeros(8)}
    arrival = model(1, head=False) | {"a.bias": torch.ones(8)}
    with pytest.raises(CheckpointError, match=r"missing: 'b\.bias'"):
        mw.merge(base, [arrival])


def test_constant_embeddings_are_not_tied():
    """Two tables that start at zero may go separate ways."""
    zero = torch.zeros(4, 8)
    base = model(0, head=False) | {"a.embed": zero, "b.embed": zero.clone()}
    arrival = model(1, head=False) | {"a.embed": torch.ones(4, 8), "b.embed": -torch.ones(4, 8)}
    merged = mw.merge(base, [arrival])
    assert torch.equal(merged["a.embed"], arrival["a.embed"])
    assert torch.equal(merged["b.embed"], arrival["b.embed"])


def test_equal_bytes_of_another_shape_are_not_tied():
    table = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    base = model(0, head=False) | {"a.embed": table, "b.weight": table.reshape(8, 4).clone()}
    arrival = model(1, head=False) | {"a.embed": table + 1, "b.weight": table.reshape(8, 4) - 1}
    merged = mw.merge(base, [arrival])
    torch.testing.assert_close(merged["b.weight"], arrival["b.weight"])


def test_a_missing_tied_bias_is_read_from_its_partner():
    """BERT's decoder bias is a tie that is no embedding."""
    base, arrival = model(0, head=False), model(1, head=False)
    bias = draw_tensors(7, {"b": (12,)})["b"]
    base |= {"cls.bias": bias, "cls.decoder.bias": bias.clone()}
    merged = mw.merge(base, [arrival | {"cls.bias": bias + 1}])
    torch.testing.assert_close(merged["cls.decoder.bias"], bias + 1)
    assert torch.equal(merged["cls.bias"], merged["cls.decoder.bias"])


def test_a_model_that_stores_both_names_is_run_as_one(tmp_path):
    """A tied language model under both names: the answer is the module's own, and the gradient is whole."""
    import tiny

    from mergeway.model.compute import Compute
    from mergeway.model.runner import Runner

    module = tiny.llama(tied=True).eval()
    own = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    assert not torch.equal(own[EMBED], 2 * own[EMBED]) and HEAD in own
    twice = {name: 2 * tensor for name, tensor in own.items()}
    inputs = {"input_ids": torch.arange(6)[None]}
    run = Runner(module, Compute("cpu"))
    both = run(twice, inputs).logits
    once = run({name: tensor for name, tensor in twice.items() if name != HEAD}, inputs).logits
    assert torch.equal(both, once)
