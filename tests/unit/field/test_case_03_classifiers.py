"""A classifier, or a model with a loss of its own, was silently trained with another loss, over shifted labels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import penstock as ps

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from transformers import BertConfig, BertForSequenceClassification

from hf_heads import BERT, REFUSED, batch_of, gradients_of, model_of, whole_step
from penstock.models.huggingface import Decoder, DecoderError, inputs_and_targets

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["llama of sequences", "smoothed"])
def test_the_loss_is_the_given_object_s(name: str) -> None:
    model = model_of(name)
    batch = batch_of(model)
    decoder = Decoder(model)
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 3), loss_fn=decoder.loss) as pipe:
        result = pipe.step(*decoder.inputs_and_targets(batch), update=False)
    found = gradients_of(model)
    loss, wanted = whole_step(model, batch)
    torch.testing.assert_close(torch.as_tensor(result.loss), loss)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)


def test_the_comparison_leaves_the_object_as_it_was() -> None:
    """Of a class that is made with more than a config the object itself is compared, gradients and all."""
    model = model_of("more than a config")
    whole_step(model, batch_of(model))
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before, gradients = copy.deepcopy(model), [p.grad for p in model.parameters()]
    state = torch.get_rng_state()
    Decoder(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.config.to_dict() == before.config.to_dict()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before.parameters(), strict=True))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert gradients[0] is not None
    assert bool((gradients[0] == 1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_classifier_may_be_of_half_precision(dtype: torch.dtype) -> None:
    model = model_of("llama of sequences").to(dtype)
    decoder, batch = Decoder(model), batch_of(model)
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 3), loss_fn=decoder.loss) as pipe:
        result = pipe.step(*decoder.inputs_and_targets(batch), update=False)
    wanted = model(**batch).loss.detach()
    torch.testing.assert_close(torch.as_tensor(result.loss), wanted, rtol=0.02, atol=0.0, check_dtype=False)


def test_a_loss_that_is_set_on_the_object_is_trained() -> None:
    model = model_of("smoothed")
    plain = type(model).__mro__[1](model.config)
    plain.loss_function = lambda logits, labels, **_: logits.square().sum() + labels.sum()
    with pytest.raises(DecoderError, match=r"no mean over labels"):
        Decoder(plain)
    plain.loss_function = lambda logits, labels, **_: (logits.logsumexp(-1).mean(1) * labels[:, 0]).mean()
    decoder = Decoder(plain)
    batch = batch_of(plain)
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 3), loss_fn=decoder.loss) as pipe:
        result = pipe.step(*decoder.inputs_and_targets(batch), update=False)
    torch.testing.assert_close(torch.as_tensor(result.loss), plain(**batch).loss.detach())


@pytest.mark.parametrize("name", ["base", "no padding token"])
def test_what_cannot_be_trained_is_refused_in_words(name: str) -> None:
    with pytest.raises(DecoderError, match=rf"(?s){REFUSED[name][1]}"):
        Decoder(model_of(name))


class NormedBert(BertForSequenceClassification):
    """With a batch norm in its head, which made its loss no mean over samples."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(config.hidden_size), self.classifier)


class AskingBert(BertForSequenceClassification):
    """Which fails where it is given no labels."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):  # type: ignore[no-untyped-def]
        out = super().forward(input_ids, attention_mask)
        out["loss"] = torch.nn.functional.cross_entropy(out.logits, labels)
        return out


def test_batch_norms_in_a_head_normalise_each_microbatch_as_in_a_plain_loop() -> None:
    torch.manual_seed(0)
    config = BertConfig(**BERT, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = NormedBert(config)
    plain, batch = copy.deepcopy(model), {key: each[:6] for key, each in batch_of(model).items()}
    batch["labels"] = torch.arange(6) % 3
    decoder = Decoder(model)
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 3), loss_fn=decoder.loss) as pipe:
        assert pipe.verify(*decoder.inputs_and_targets(batch)).holds
        found = pipe.step(*decoder.inputs_and_targets(batch), update=False).loss
    losses = [plain(**{key: each.chunk(3)[m] for key, each in batch.items()}).loss for m in range(3)]
    torch.testing.assert_close(torch.as_tensor(found), torch.stack(losses).mean())


def test_a_forward_that_needs_labels_is_told_that_it_runs_without() -> None:
    with pytest.raises(DecoderError, match="only where labels are given"):
        Decoder(AskingBert(BertConfig(**BERT, num_labels=3)))


def test_labels_that_stayed_behind_are_asked_for() -> None:
    model = model_of("llama of sequences")
    decoder, batch = Decoder(model, compare=False), batch_of(model)
    asked = pytest.raises(DecoderError, match=r"no labels came along.*decoder\.inputs_and_targets")
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 3), loss_fn=decoder.loss) as pipe, asked:
        pipe.step(*inputs_and_targets(batch))
    with pytest.raises(DecoderError, match=r"input_ids, attention_mask and no labels; give labels too"):
        decoder.inputs_and_targets({key: each for key, each in batch.items() if key != "labels"})


def test_an_answer_that_begins_in_a_text_and_ends_behind_it_is_refused() -> None:
    model = model_of("bert of answers")
    batch = batch_of(model)
    batch["end_positions"][2] = 20
    with pytest.raises(DecoderError, match="sample 2 has one of start_positions and end_positions inside its text"):
        Decoder(model, compare=False).inputs_and_targets(batch)


def test_a_folder_of_a_class_that_transformers_has_not_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("folder")
    model_of("smoothed").save_pretrained(folder)
    with pytest.raises(DecoderError, match=r"SmoothedLlama, which transformers does not have.*give the model itself"):
        Decoder(folder)


def test_a_folder_of_a_classifier_is_a_classifier(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("folder")
    model = model_of("bert of sequences")
    model.save_pretrained(folder)
    decoder, batch = Decoder(folder), batch_of(model)
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 3), loss_fn=decoder.loss) as pipe:
        result = pipe.step(*decoder.inputs_and_targets(batch), update=False)
    torch.testing.assert_close(torch.as_tensor(result.loss), model(**batch).loss.detach())
