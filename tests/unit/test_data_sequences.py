"""Whole documents as sequences: none left out, none run into another, the same in every step in whatever order."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from penstock.data import ByteTokenizer, Corpus, DataError, Sequences, document_lengths, open_corpus, prepare

pytestmark = pytest.mark.unit

CONTEXT = 16


def documents(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of documents, each of which counts up from a number of its own, and where they begin."""
    draw = np.random.default_rng(seed)
    lengths = np.maximum(1, draw.lognormal(2.5, 1.0, num)).astype(int)
    tokens = np.concatenate([np.arange(n) + 1000 * d for d, n in enumerate(lengths)])
    return tokens, np.cumsum(lengths) - lengths


def test_every_token_with_a_successor_in_its_document_is_an_input_once_an_epoch() -> None:
    tokens, starts = documents(50, 0)
    sequences = Sequences(tokens, starts, CONTEXT, 64)
    rows = [sequences.row([k]) for k in range(len(sequences))]
    for row in rows:
        assert np.array_equal(row.targets, row.inputs + 1)  # within one document
        assert 1 <= row.inputs.shape[1] <= CONTEXT
        assert row.lengths.tolist() == [row.inputs.shape[1]]
    lasts = {int(starts[d + 1]) - 1 if d + 1 < len(starts) else len(tokens) - 1 for d in range(len(starts))}
    wanted = sorted(int(t) for place, t in enumerate(tokens) if place not in lasts)
    assert sorted(chain(*(row.inputs[0].tolist() for row in rows))) == wanted
    assert sequences.num_tokens == len(wanted)


@pytest.mark.parametrize("step_tokens", [16, 40, 256, 5000])
def test_steps_have_each_sequence_once_an_epoch_whatever_is_asked_first(step_tokens: int) -> None:
    tokens, starts = documents(60, 1)
    sequences = Sequences(tokens, starts, CONTEXT, step_tokens, seed=3)
    num_steps = -(-3 * sequences.num_tokens // step_tokens)
    steps = [sequences.of_step(step).tolist() for step in range(num_steps)]
    in_a_row = list(chain(*steps))
    for epoch in range(2):
        assert sorted(in_a_row[epoch * len(sequences) :][: len(sequences)]) == list(range(len(sequences)))
    assert in_a_row[: len(sequences)] != in_a_row[len(sequences) :][: len(sequences)]
    again = Sequences(tokens, starts, CONTEXT, step_tokens, seed=3)
    for step in random.Random(0).sample(range(num_steps), num_steps):
        assert again.of_step(step).tolist() == steps[step]
        # A step can be cut into as many microbatches as it has contexts.
        assert len(steps[step]) >= step_tokens // CONTEXT
        assert abs(int(sequences.lengths[steps[step]].sum()) - step_tokens) <= CONTEXT


def test_sequences_lie_in_one_row_one_after_the_other() -> None:
    tokens, starts = documents(30, 2)
    sequences = Sequences(tokens, starts, CONTEXT, 64)
    row = sequences.row([7, 3, 11])
    parts = [sequences.row([k]) for k in (7, 3, 11)]
    assert np.array_equal(row.inputs, np.concatenate([part.inputs for part in parts], 1))
    assert np.array_equal(row.targets, np.concatenate([part.targets for part in parts], 1))
    assert row.inputs.dtype == row.targets.dtype == row.lengths.dtype == np.int64
    assert row.lengths.tolist() == [part.inputs.shape[1] for part in parts]


def test_what_makes_no_sequences_is_refused() -> None:
    tokens, starts = documents(30, 2)
    with pytest.raises(DataError, match="no document has two tokens"):
        Sequences(np.arange(5), np.arange(5), CONTEXT, 64)
    with pytest.raises(DataError, match=r"8 tokens a step; it must have at least a context's, 16"):
        Sequences(tokens, starts, CONTEXT, 8)
    with pytest.raises(DataError, match="a context of 0"):
        Sequences(tokens, starts, 0, 8)
    far = Sequences(tokens, starts, CONTEXT, 64, vocab_size=1000)
    with pytest.raises(DataError, match=r"token 1000 at position \d+ of the data, outside the vocabulary of 1000"):
        far.row(range(len(far)))
    with pytest.raises(IndexError, match="step -1"):
        Sequences(tokens, starts, CONTEXT, 64).of_step(-1)


def pieces(corpus: Corpus) -> list[bytes]:
    """The documents of both sides."""
    found = []
    for tokens, starts in ((corpus.train, corpus.train_starts), (corpus.validation, corpus.validation_starts)):
        assert document_lengths(tokens.size, starts).sum() == tokens.size
        found += [part.tobytes() for part in np.split(np.asarray(tokens, np.uint8), starts)[1:]]
    return found


def test_a_corpus_knows_where_its_documents_begin(tmp_path: Path) -> None:
    texts = [f"text {number} ".encode() * (number + 1) for number in range(30)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_bytes(text)
    ended = [text + b"\0" for text in texts]
    assert sorted(pieces(open_corpus(tmp_path))) == sorted(ended)
    prepare(tmp_path, tmp_path / "pair", ByteTokenizer())
    assert pieces(open_corpus(tmp_path / "pair.bin")) == ended
    # A document that lies on both sides is one on each.
    lone = tmp_path / "lone.jsonl"
    lone.write_text('{"text": "' + "abc " * 50 + '"}\n{"text": "' + "de " * 50 + '"}\n')
    both = open_corpus(lone)
    assert len(both.train_starts) == 2
    assert both.validation_starts.tolist() == [0]
    assert b"".join(pieces(both)) == b"abc " * 50 + b"\0" + b"de " * 50 + b"\0"
