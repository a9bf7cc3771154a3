"""Heads and losses of transformers that are no plain language model's: trained as they are, or refused by reason."""

from __future__ import annotations

import pytest
import torch

import penstock as ps
from tiers import others_nightly

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from hf_heads import REFUSED, TRAINED, are_equal, batch_of, gradients_of, loop_step, model_of, whole_step
from penstock.models.huggingface import Decoder, DecoderError

pytestmark = pytest.mark.usefixtures("one_thread")

BY_DAY = ["bert of sequences", "bert of answers", "gpt2 of tokens", "mean of texts"]


@pytest.mark.parametrize("name", others_nightly(TRAINED, BY_DAY))
def test_the_object_that_is_given_is_trained(name: str) -> None:
    """Over three microbatches of uneven padding: bit for bit as a loop over them, and close to the whole batch."""
    model = model_of(name)
    batch = batch_of(model)
    decoder = Decoder(model)
    assert decoder.has_own_loss
    assert not any(p.grad is not None for p in model.parameters())
    inputs, targets = decoder.inputs_and_targets(batch)
    whole, wanted = whole_step(model, batch)
    weights = [decoder.loss.weight(_part(targets, m)) for m in range(3)]
    looped, exactly = loop_step(model, batch, 3, weights)
    parallel = ps.ParallelOptions(tied=decoder.tied)
    with ps.Pipeline(decoder.stages(4), ps.build("zb-h1", 4, 3), loss_fn=decoder.loss, parallel=parallel) as pipe:
        result = pipe.step(inputs, targets, update=False)
        assert torch.equal(torch.as_tensor(result.loss), looped)
        torch.testing.assert_close(torch.as_tensor(result.loss), whole, rtol=1e-5, atol=1e-6)
        found = gradients_of(model)
        assert are_equal(found, exactly, exactly=True) == []
        assert are_equal(found, wanted, exactly=False) == []
        evaluated = torch.as_tensor(pipe.evaluate(inputs, targets).loss)
        with torch.no_grad():
            torch.testing.assert_close(evaluated, model.eval()(**batch)["loss"], rtol=1e-5, atol=1e-6)
        unlabelled = {key: each for key, each in inputs.items() if key not in decoder.anatomy.labels}
        assert "loss" not in pipe.predict(unlabelled)[0]


def _part(targets: object, m: int) -> object:
    if isinstance(targets, dict):
        return {key: each.tensor_split(3)[m] for key, each in targets.items()}
    return targets.tensor_split(3)[m]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", others_nightly(REFUSED, ["looks inside", "contrast"]))
def test_what_cannot_be_cut_is_refused_by_its_reason(name: str) -> None:
    with pytest.raises(DecoderError, match=rf"(?s){REFUSED[name][1]}"):
        Decoder(model_of(name))
