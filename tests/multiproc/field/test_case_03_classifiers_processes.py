"""A classifier over processes: the loss and gradients of the whole batch, with a Decoder and with the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from processes import run_ranks_to_end
from trainer_runs import arguments, as_torchrun_says

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NAME = "qwen2 of tokens"


def trained(rank: int, folder: Path) -> dict[str, Any]:
    """One rank: a step of a Decoder, whose gradients are those of its stages, and one update of the Trainer."""
    from hf_heads import batch_of, gradients_of, model_of
    from penstock.integrations.transformers import PipelineTrainer
    from penstock.models.huggingface import Decoder

    as_torchrun_says(rank)
    model = model_of(NAME)
    batch, decoder = batch_of(model), Decoder(model)
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 3), loss_fn=decoder.loss) as pipe:
        inputs, targets = decoder.inputs_and_targets(batch)
        loss = float(pipe.step(inputs, targets, update=False).loss)
        held = {name for name, _ in pipe.named_parameters()}
        gradients = {name: each for name, each in gradients_of(model).items() if name in held}
        predicted = torch.cat([each["logits"] for each in pipe.predict(inputs)])
    samples = [{name: each[index] for name, each in batch.items()} for index in range(6)]
    args = arguments(
        folder, max_steps=1, gradient_accumulation_steps=3, save_strategy="no", eval_strategy="no", max_grad_norm=0.0
    )
    trainer = PipelineTrainer(model, args, train_dataset=samples, eval_dataset=samples)
    trainer.train()
    first = trainer.state.log_history[0]["loss"]
    return {"loss": loss, "gradients": gradients, "predicted": predicted, "first": first, **trainer.evaluate()}


def test_processes_train_it_as_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hf_heads import batch_of, model_of, whole_step

    model = model_of(NAME)
    batch = batch_of(model)
    loss, gradients = whole_step(model, batch)
    logits = model.eval()(**batch).logits.detach()
    first = model(**{name: each[:6] for name, each in batch.items()}).loss.item()
    outcomes = run_ranks_to_end(2, trained, tmp_path)
    found: dict[str, Any] = {}
    for outcome in outcomes:
        assert outcome.value["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert outcome.value["first"] == pytest.approx(first, rel=1e-6)
        assert outcome.value["eval_loss"] == outcomes[0].value["eval_loss"]
        torch.testing.assert_close(outcome.value["predicted"], logits)
        found |= outcome.value["gradients"]
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
