"""Text for a model that reads one text and writes another: spans of it are cut out, and it writes them.

Raffel et al. 2020 (arXiv 1910.10683), section 3.1.4: 15% of the tokens are cut out, in spans of three on average.
Each span leaves a mark of its own in the text that is read, and the text to be written is the spans behind their
marks. A tokenizer without such marks has one mask, which stands for any span (Lewis et al. 2020, arXiv 1910.13461,
"text infilling"), and the text to be written is the whole one.

    the text    Thank you for inviting me to your party last week
    read        Thank you <0> me to your party <1> week
    to write    <0> for inviting <1> last <2>
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.data import ByteTokenizer, Tokenizer
from penstock.data.tokenizer import FileTokenizer
from penstock.models.huggingface import Decoder
from penstock.runtime import Pipeline
from penstock.train.checks import SettingsError
from penstock.train.tasks.masked import MASKS, judge_guesses, mask_of
from penstock.train.tasks.task import Draws, Example, ModelQuality, TaskData, redrawn

SHARE, LENGTH = 0.15, 3
"""Of the tokens that are cut out, and the tokens of a span on average."""
SENTINEL = "<extra_id_{}>"
COUNTED = 16
"""Batches whose targets are counted for what frequencies alone give."""


@dataclass(frozen=True)
class SpanForm:
    """How texts of one length are cut up.

    Attributes:
        length: tokens of a text.
        marks: the number of the mark of each span, and one that ends the last, or of the one mask.
    """

    length: int
    marks: tuple[int, ...]

    @property
    def num_cut(self) -> int:
        """Tokens that are cut out."""
        return num_cut(self.length)

    @property
    def num_spans(self) -> int:
        return num_spans(self.length)

    @property
    def writes_all(self) -> bool:
        """Whether the whole text is to be written."""
        return len(self.marks) == 1

    @property
    def num_read(self) -> int:
        """Tokens of the text that is read."""
        return self.length - self.num_cut + self.num_spans

    @property
    def num_written(self) -> int:
        """Tokens of the text that is written."""
        return self.length if self.writes_all else self.num_cut + self.num_spans + 1

    def cut(self, text: Any, draw: np.random.Generator) -> tuple[Any, Any]:
        """Cuts a text[length] into what is read, [num_read], and what is written, [num_written]; both of
        whole numbers.
        """
        kept = _parts(self.length - self.num_cut, self.num_spans, draw)
        gone = _parts(self.num_cut, self.num_spans, draw)
        read: list[Any] = []
        written: list[Any] = []
        place = 0
        for number, (before, inside) in enumerate(zip(kept, gone, strict=True)):
            mark = [self.marks[0 if self.writes_all else number]]
            end = place + before + inside
            read += [text[place : place + before], mark]
            written += [mark, text[place + before : end]]
            place = end
        if self.writes_all:
            return np.concatenate(read), text
        return np.concatenate(read), np.concatenate([*written, [self.marks[-1]]])


def num_cut(length: int) -> int:
    """Tokens that are cut out of a text of `length`."""
    return max(1, round(SHARE * length))


def num_spans(length: int) -> int:
    """Spans that they lie in."""
    return max(1, round(num_cut(length) / LENGTH))


def _parts(total: int, count: int, draw: np.random.Generator) -> list[int]:
    """A number as a sum of `count` others of at least 1, each such sum as likely as another."""
    ends = np.sort(draw.choice(total - 1, count - 1, replace=False)) + 1
    return [int(each) for each in np.diff([0, *ends, total])]


def span_form(tokenizer: Tokenizer, length: int, vocab_size: int, model: str) -> SpanForm:
    """The form for texts of `length` tokens. Raises SettingsError where the tokenizer has no marks for spans."""
    if length < 4:
        raise SettingsError(f"--context {length} is too short a text to cut spans out of; give at least 4")
    needed = num_spans(length) + 1
    if isinstance(tokenizer, FileTokenizer):
        found = [tokenizer.number_of(SENTINEL.format(number)) for number in range(needed)]
        if all(number is not None for number in found):
            return SpanForm(length, tuple(int(number) for number in found if number is not None))
        mask = mask_of(tokenizer)
        if mask is not None:
            return SpanForm(length, (mask,))
        have = sum(number is not None for number in found)
        raise SettingsError(
            f"{model} writes the spans that are cut out of a text, and the tokenizer {tokenizer.name} has {have} of "
            f"the {needed} marks {SENTINEL.format(0)} ... that texts of {length} tokens need, and no "
            f"{' or '.join(MASKS)}; give the --tokenizer that the model was made for, or less --context"
        )
    first = ByteTokenizer.vocab_size
    if vocab_size < first + needed:
        raise SettingsError(
            f"{model} writes the spans that are cut out of a text, and its vocabulary of {vocab_size} has no "
            f"{needed} numbers behind those of the 256 bytes to mark them; give the --tokenizer that it was made for"
        )
    return SpanForm(length, tuple(range(first, first + needed)))


def spans(data: TaskData, form: SpanForm, decoder: Decoder, seed: int) -> TaskData:
    """Texts of which spans are cut out."""
    return redrawn(data, lambda example, draws: _cut(example, form, decoder, draws), seed)


def _cut(example: Example, form: SpanForm, decoder: Decoder, draws: Draws) -> Example:
    draw = np.random.default_rng(draws)
    pairs = [form.cut(text, draw) for text in example.inputs.numpy()]
    read, written = (torch.from_numpy(np.stack(each).astype(np.int64)) for each in zip(*pairs, strict=True))
    return Example(*decoder.inputs_and_targets({"input_ids": read, "labels": written}))


def judge_spans(pipe: Pipeline, data: TaskData, loss: float) -> ModelQuality:
    """Compares the model with guessing each token by its frequency in what is written. Every rank must call it."""
    tokens = torch.cat([data.batches[step].targets.flatten() for step in range(COUNTED)])
    most = max(int(example.targets.max()) for example in data.validation)
    counts = np.bincount(tokens.numpy(), minlength=most + 1)
    unit = "nats a token that is written, on the validation text"
    return judge_guesses(pipe, data, loss, counts, unit, "of the tokens right, each after the right ones before it")
