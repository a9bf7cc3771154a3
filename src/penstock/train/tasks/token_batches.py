"""Batches of the user's own for a model of Hugging Face's, as the collators of transformers make them.

    {"input_ids": [B, T], "attention_mask": [B, T], "labels": [B, T], ...}

Labels are as the models' own losses take them. For a decoder they are the tokens themselves, not shifted, and -100
for a token that does not count. A model with an encoder has labels of their own length.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.models.huggingface import Decoder, DecoderError
from penstock.models.huggingface.pictures import IMAGES
from penstock.train.checks import SettingsError
from penstock.train.tasks.own_data import OPTION, require_samples, tensors_of
from penstock.train.tasks.task import Example

TOKENS, LABELS = "input_ids", "labels"
IGNORED = -100
NOT_TAKEN = ("inputs_embeds", "decoder_inputs_embeds", "past_key_values")
"""Arguments of a forward in place of tokens, or for writing one token after another."""


class TokenBatchReader:
    """Turns a batch of the user's data into inputs and labels. It refuses whatever a stage could not run.

    Args:
        model: as it was given, for errors.
    """

    def __init__(self, decoder: Decoder, model: str) -> None:
        self._decoder, self._model = decoder, model
        known = inspect.signature(type(decoder.model).forward).parameters
        self._names = [name for name in known if name not in ("self", *NOT_TAKEN)]
        config = decoder.config.get_text_config(decoder=True)
        self._num_read = int(decoder.model.get_input_embeddings().num_embeddings)
        self._num_written = int(config.vocab_size)
        self._most = getattr(config, "max_position_embeddings", None)  # T5 and Mamba take any number

    def __call__(self, batch: Any, what: str) -> Example:
        """Raises SettingsError for a batch that does not fit the model; `what` says in errors which it is."""
        if not isinstance(batch, Mapping):
            raise SettingsError(
                f"{OPTION}: {what} is a {type(batch).__name__}, and {self._model} takes dicts of tensors; give "
                f"{{'{TOKENS}': ..., '{LABELS}': ...}}, as the collators of transformers do"
            )
        given = tensors_of(batch)
        self._check_names(given, what)
        require_samples(given, None, what)
        self._check_tokens(given[TOKENS], TOKENS, self._num_read, what)
        self._check_labels(given, what)
        try:
            if self._decoder.pictures is not None:
                self._decoder.pictures.check(given[TOKENS], given.get(IMAGES))
            return Example(*self._decoder.inputs_and_targets(given))
        except DecoderError as error:
            raise SettingsError(f"{OPTION}: {what}: {error}") from None

    def _check_names(self, given: Mapping[str, Any], what: str) -> None:
        has = f"{what} has {', '.join(map(str, given)) or 'nothing'}"
        if LABELS not in given:
            raise SettingsError(
                f"{OPTION}: {has} and no {LABELS}; give {LABELS} too, which are the {TOKENS} themselves where the "
                f"model writes on, with {IGNORED} where a token does not count"
            )
        if TOKENS not in given:
            raise SettingsError(f"{OPTION}: {has} and no {TOKENS}; give the tokens under that name")
        for name, value in given.items():
            if name not in self._names:
                raise SettingsError(
                    f"{OPTION}: {has}, and the forward of {self._model} takes no {name!r}; leave it out, or name it "
                    "as the forward does"
                )
            if name.startswith(IMAGES) and self._decoder.pictures is None:
                raise SettingsError(
                    f"{OPTION}: {has}, and {self._model} takes no pictures, or pictures of no one size; leave "
                    f"{name} out"
                )
            if not isinstance(value, Tensor):
                raise SettingsError(
                    f"{OPTION}: {name} in {what} is a {type(value).__name__} and not a tensor; give tensors with "
                    'the samples in dimension 0, with return_tensors="pt" of a tokenizer'
                )

    def _check_labels(self, given: Mapping[str, Tensor], what: str) -> None:
        labels = given[LABELS]
        counted = labels[labels != IGNORED]
        self._check_tokens(labels, LABELS, self._num_written, what, counted)
        if not self._decoder.has_encoder and labels.shape != given[TOKENS].shape:
            raise SettingsError(
                f"{OPTION}: {LABELS} in {what} have shape {list(labels.shape)} and {TOKENS} "
                f"{list(given[TOKENS].shape)}; give a label for each token, {IGNORED} where it does not count"
            )
        if not self._decoder.loss.weight(labels):
            is_next = not (self._decoder.has_encoder or self._decoder.is_masked)
            raise SettingsError(
                f"{OPTION}: no label in {what} counts, so nothing would be learnt from it; give {LABELS} other than "
                f"{IGNORED}{' behind the first token' if is_next else ''}"
            )

    def _check_tokens(
        self, tokens: Tensor, name: str, vocab_size: int, what: str, counted: Tensor | None = None
    ) -> None:
        """Checks whole numbers [B, T] within the vocabulary; for labels, those that count."""
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise SettingsError(
                f"{OPTION}: {name} in {what} are {str(tokens.dtype).removeprefix('torch.')}{list(tokens.shape)}; "
                "give whole numbers [samples, tokens]"
            )
        if self._most is not None and tokens.shape[1] > self._most:
            raise SettingsError(
                f"{OPTION}: {name} in {what} are {tokens.shape[1]} tokens long, and {self._model} takes {self._most} "
                "at most; cut them"
            )
        seen = tokens if counted is None else counted
        if not seen.numel():
            return
        low, high = int(seen.min()), int(seen.max())
        if low < 0 or high >= vocab_size:
            raise SettingsError(
                f"{OPTION}: {name} in {what} hold {low if low < 0 else high}, and {self._model} has a vocabulary of "
                f"{vocab_size}, counted from 0; give tokens of the tokenizer that the model was made for"
            )
