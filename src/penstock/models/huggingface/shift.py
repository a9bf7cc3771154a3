"""What the decoder of a model with an encoder is given for labels: the model's own code shifts them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import Anatomy, DecoderError
from penstock.models.huggingface.frame import StoppedAtBlock, encoded, hollow

__all__ = ["Shift"]


class Shift:
    """Runs a model, whose weights may lie on the meta device, as far as its decoder, which is told what to read."""

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
    """In place of a decoder: stops with the tokens that it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is None:
            raise ValueError("it gives its decoder no input_ids")
        raise StoppedAtBlock(tokens)
