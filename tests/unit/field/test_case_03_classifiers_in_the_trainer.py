"""The Trainer integration trained classifiers on another loss, or ended in a TypeError. It says what Decoder does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[trainer]'")
pytest.importorskip("accelerate")

import transformers

import penstock as ps
from hf_families import batch_of as pairs_of
from hf_families import model_of as family_of
from hf_heads import REFUSED, TRAINED, batch_of, gradients_of, model_of, whole_step
from penstock.integrations.transformers import PipelineTrainer
from penstock.models.huggingface import Decoder, DecoderError
from tiers import others_nightly
from trainer_runs import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

BY_DAY = ["bert of answers", "qwen2 of tokens"]


class Samples(torch.utils.data.Dataset):
    """A batch, sample by sample."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: each[index] for name, each in self.batch.items()}


def one_update(folder: Path, **changes: Any) -> Any:
    """Arguments for one update on six samples, in order, by plain gradient descent."""
    options = {
        "max_steps": 1, "gradient_accumulation_steps": 3, "optim": "sgd", "max_grad_norm": 0.0, "weight_decay": 0.0,
        "learning_rate": 0.1, "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential",
        "save_strategy": "no", "eval_strategy": "no", "remove_unused_columns": False,
    }  # fmt: skip
    return arguments(folder, **{**options, **changes})


@pytest.mark.parametrize("name", [*others_nightly(TRAINED, BY_DAY), "t5"])
def test_an_update_follows_from_the_loss_of_its_batches_as_one(name: str, tmp_path: Path) -> None:
    """Uneven padding and all. A T5's loss was taken over labels shifted once more."""
    model = family_of(name) if name == "t5" else model_of(name)
    batch = pairs_of(name) if name == "t5" else batch_of(model)
    loss, gradients = whole_step(model, {key: each[:6] for key, each in batch.items()})
    wanted = {
        key: p.detach() - 0.1 * gradients[key] for key, p in model.named_parameters() if gradients[key] is not None
    }  # type: ignore[operator]
    trainer = PipelineTrainer(model, one_update(tmp_path), train_dataset=Samples(batch), num_ranks=2)
    trainer.train()
    found = dict(model.named_parameters())
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert [key for key in wanted if not torch.allclose(found[key], wanted[key], rtol=1e-4, atol=1e-6)] == []


@pytest.mark.parametrize("name", others_nightly(REFUSED, ["base", "contrast"]))
def test_it_refuses_in_the_words_of_the_decoder(name: str, tmp_path: Path) -> None:
    with pytest.raises(DecoderError) as by_decoder:
        Decoder(model_of(name))
    with pytest.raises(DecoderError) as by_trainer:
        PipelineTrainer(model_of(name), one_update(tmp_path), num_ranks=2)
    assert str(by_trainer.value) == str(by_decoder.value)


def test_a_compute_loss_of_ones_own_was_never_called(tmp_path: Path) -> None:
    class Weighted(PipelineTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **rest: Any) -> Any:
            return 2 * super().compute_loss(model, inputs, *args, **rest)

    with pytest.raises(ps.RuntimeFailure, match=r"Weighted has a compute_loss of its own.*compute_loss_func="):
        Weighted(model_of("llama of sequences"), one_update(tmp_path), num_ranks=2)


def measured(prediction: Any) -> dict[str, float]:
    """The sizes of what a metric gets, for each of the model's outputs and labels."""
    found = {}
    for what in ("predictions", "label_ids"):
        given = getattr(prediction, what)
        for number, each in enumerate(given if isinstance(given, tuple) else [given]):
            found[f"{what}{number}"] = float(numpy.abs(each).sum())
    return found


@pytest.mark.parametrize("name", ["bert of sequences", "bert of answers"])
def test_a_metric_gets_the_outputs_and_labels_that_the_plain_trainer_gives_it(name: str, tmp_path: Path) -> None:
    batch = batch_of(model_of(name))
    common = {"args": one_update(tmp_path), "eval_dataset": Samples(batch), "compute_metrics": measured}
    plain = transformers.Trainer(model_of(name), **common).evaluate()
    trainer = PipelineTrainer(model_of(name), num_ranks=2, **common)
    ours = trainer.evaluate()
    keys = [key for key in plain if "_per_" not in key and "time" not in key]
    assert len(keys) >= 3
    for key in keys:
        assert ours[key] == pytest.approx(plain[key], rel=1e-5), key
    unlabelled = {key: each for key, each in batch.items() if key in ("input_ids", "attention_mask")}
    predicted = trainer.predict(Samples(unlabelled)).predictions
    assert (predicted[0] if isinstance(predicted, tuple) else predicted).shape[0] == len(batch["input_ids"])
    assert gradients_of(trainer.model).keys()


def test_label_smoothing_replaces_a_classifier_s_loss_as_in_the_plain_trainer(tmp_path: Path) -> None:
    name = "llama of sequences"
    data = Samples(batch_of(model_of(name)))
    args = one_update(tmp_path, label_smoothing_factor=0.1)
    plain = transformers.Trainer(model_of(name), args, train_dataset=data)
    plain.train()
    trainer = PipelineTrainer(model_of(name), args, train_dataset=data, num_ranks=2)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == plain.state.log_history[0]["loss"]
