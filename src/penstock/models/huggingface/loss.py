"""The losses of Hugging Face models, and batches as their users have them.

A model over tokens has a loss that follows from its logits. Of other models it is the one that their own forward
returns for its labels.

The labels go along with the inputs to the last layer, which calls the model's own forward. There the embedding and
the blocks are stand-ins, and the head, the pooling and the loss are the model's:

    inputs, labels  -->  embedding  -->  blocks  -->  the model's forward: head, pooling, loss
                                                      {"loss": ..., "logits": ..., ...}

What the loss is a mean over (labels, labels but the first of a text, or samples) is found by trying it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import Anatomy, DecoderError
from penstock.models.huggingface.frame import StoppedAtBlock, encoded, hollow
from penstock.models.loss import CrossEntropy

__all__ = [
    "COUNTED",
    "NextTokenLoss",
    "OwnLoss",
    "Shift",
    "WithRouterLoss",
    "class_with_forward",
    "has_token_loss",
    "inputs_and_targets",
    "label_names",
    "split_batch",
]

OVER_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "MTModel")
"""Ends of the names of classes whose loss is over tokens."""
POSITIONS = ("start_positions", "end_positions")
IGNORED = -100
COUNTED = ("labels", "labels behind the first of each text", "samples")
"""What a loss may be a mean over."""


class NextTokenLoss:
    """Mean negative log-likelihood, in nats, of each label given the tokens before it, as the models' own `loss`.

    Labels are not shifted yet: they are the tokens themselves, -100 where one does not count.
    """

    def __init__(self) -> None:
        self._mean = CrossEntropy()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits[B, T, V] and labels[B, T] to a scalar."""
        shifted = labels.new_full(labels.shape, self._mean.ignore_index)
        shifted[..., :-1] = labels[..., 1:]
        return self._mean(logits, shifted)

    def weight(self, labels: Tensor) -> int:
        """How many tokens of labels[B, T] are guessed."""
        return self._mean.weight(labels[..., 1:])

    def __repr__(self) -> str:
        return "NextTokenLoss()"


class WithRouterLoss:
    """A loss over tokens, and besides it what a mixture of experts adds so that its routers use them all alike.

    The output is a dict then: `logits`, and `router_loss`, times its coefficient.
    """

    def __init__(self, loss: NextTokenLoss | CrossEntropy) -> None:
        self._loss = loss

    def __call__(self, output: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """The output of the last stage and labels[B, T] to a scalar."""
        return self._loss(output["logits"], labels) + output["router_loss"]

    def weight(self, labels: Tensor) -> int:
        """How many tokens of labels[B, T] are guessed."""
        return self._loss.weight(labels)

    def __repr__(self) -> str:
        return f"WithRouterLoss({self._loss!r})"


def inputs_and_targets(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """A batch of `input_ids`, `attention_mask`, ... and `labels` as what `pipe.step` takes.

    Raises DecoderError where there are no labels.
    """
    inputs = dict(batch)
    if "labels" not in inputs:
        raise DecoderError(f"the batch has {', '.join(inputs) or 'nothing'} and no labels; give labels=input_ids")
    labels = inputs.pop("labels")
    return inputs, labels


class OwnLoss:
    """The loss that the last layer returns, and what it is a mean over.

    Args:
        counted: one of COUNTED.
    """

    def __init__(self, counted: str) -> None:
        self.counted = counted

    def __call__(self, output: Mapping[str, Tensor], targets: Any) -> Tensor:
        """The loss in the last layer's output. Raises DecoderError where there is none."""
        if "loss" not in output:
            raise DecoderError(
                "the model's own forward returned no loss, as no labels came along; take them from "
                "decoder.inputs_and_targets(batch), which leaves them among the inputs"
            )
        return output["loss"]

    def weight(self, targets: Any) -> int:
        """How many entries of the labels count."""
        labels: Tensor = next(iter(targets.values())) if isinstance(targets, Mapping) else targets
        if self.counted == "samples" or labels.is_floating_point():
            return len(labels)
        return int(((labels[..., 1:] if self.counted == COUNTED[1] else labels) != IGNORED).sum())

    def __repr__(self) -> str:
        return f"OwnLoss({self.counted!r})"


def class_with_forward(model: Any) -> type:
    """The class whose forward a model has."""
    return next(kind for kind in type(model).__mro__ if "forward" in vars(kind))


def has_token_loss(model: Any) -> bool:
    """Whether forward and loss are those of transformers for a model over tokens, whose loss follows from logits."""
    from transformers import PreTrainedModel

    kind = class_with_forward(model)
    return (
        kind.__name__.endswith(OVER_TOKENS)
        and kind.__module__.startswith("transformers.")
        and type(model).loss_function is PreTrainedModel.loss_function
        and not {"forward", "_loss_function"} & vars(model).keys()
    )


def default_loss(model: Any) -> OwnLoss:
    """The loss of a model that is not tried: by its class, as gradient accumulation counts."""
    names = [kind.__name__ for kind in type(model).__mro__]
    writes_on = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    return OwnLoss(COUNTED[1] if writes_on else COUNTED[0])


def label_names(model: Any) -> tuple[str, ...]:
    """Under which names a model's forward takes labels.

    Raises:
        DecoderError: it takes none, and so has no loss.
    """
    for kind in type(model).__mro__:
        known = inspect.signature(vars(kind)["forward"]).parameters if "forward" in vars(kind) else ()
        if names := tuple(name for name in known if name.endswith(("labels", "label")) or name in POSITIONS):
            return names
    raise DecoderError(
        f"{type(model).__name__} has no loss, as its forward takes no labels. Load it with a head "
        "(AutoModelForCausalLM, AutoModelForSequenceClassification, ...), or give it a loss: a subclass whose "
        "forward takes labels and returns a dict with 'loss'"
    )


def split_batch(batch: Mapping[str, Any], names: Sequence[str], main_input: str) -> tuple[dict[str, Any], Any]:
    """A batch as inputs and targets. With names of labels these stay among the inputs, and are the targets too: one
    tensor, or a dict where there are more. Positions behind a text count for nothing, as in the models' own losses.

    Raises:
        DecoderError: no labels; a position inside a text whose other position is behind it.
    """
    if not names:
        return inputs_and_targets(batch)
    labels = {name: batch[name] for name in names if batch.get(name) is not None}
    if not labels:
        raise DecoderError(
            f"the batch has {', '.join(batch) or 'nothing'} and no labels; give {' and '.join(names)} too"
        )
    if set(POSITIONS) <= set(labels):
        starts, ends = (labels[name] >= batch[main_input].shape[1] for name in POSITIONS)
        if bool((starts != ends).any()):
            raise DecoderError(
                f"sample {int((starts != ends).long().argmax())} has one of {' and '.join(POSITIONS)} inside its "
                "text and one behind its end, and the model's loss weighs the two apart; leave such samples out, or "
                "give both the place that says there is no answer"
            )
        labels |= {name: labels[name].masked_fill(starts, IGNORED) for name in POSITIONS}
    return dict(batch), next(iter(labels.values())) if len(labels) == 1 else labels


class Shift:
    """Makes the decoder's input of labels, by the model's own code.

    It runs a model, whose weights may lie on the meta device, as far as its decoder, and takes the decoder's input.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        path = anatomy.blocks.rpartition(".")[0]
        self._name = type(model).__name__
        self._frame = hollow(model, {path: _TargetsRecorder()})

    def __call__(self, labels: Tensor) -> Tensor:
        """Labels[B, T], -100 where one does not count, to tokens[B, T]. Raises DecoderError."""
        try:
            with torch.no_grad():
                self._frame(encoder_outputs=encoded(torch.zeros(len(labels), 1, 1)), labels=labels, use_cache=False)
        except StoppedAtBlock as stopped:
            return stopped.hidden
        except Exception as error:  # whatever a model's code raises where its config lacks a token
            raise DecoderError(f"{self._name} does not shift labels for its decoder: {error}") from error
        raise DecoderError(f"{self._name} does not call its decoder with tokens; give decoder_input_ids")


class _TargetsRecorder(nn.Module):
    """In place of a decoder: stops with its tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is None:
            raise ValueError("it gives its decoder no input_ids")
        raise StoppedAtBlock(tokens)
