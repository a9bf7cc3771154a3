"""A source of text as two rows of tokens, one to train on and one to validate on.

Documents are joined with the tokenizer's end-of-document token after each. About one document in twenty,
chosen by its key, is for validation; where documents are too few for that (a single text file is one) the last
twentieth of the tokens is. A `.bin`/`.idx` pair stays mapped: its last twentieth of documents is for
validation, because choosing here and there would mean to copy it.

`prepare` writes such a pair from text, so that a large corpus is mapped and not tokenised at every start.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.data.documents import (
    VALIDATION_ONE_IN,
    Document,
    folder_documents,
    is_jsonl,
    jsonl_documents,
    stdlib_documents,
    text_document,
)
from penstock.data.megatron import IndexedTokens, IndexedWriter, index_prefix
from penstock.data.tokenizer import ByteTokenizer, Tokenizer
from penstock.data.tokens import DataError, Tokens, token_dtype

__all__ = ["Corpus", "Summary", "open_corpus", "open_documents", "prepare"]

MIN_DOCUMENTS = 20
SAMPLE = 1 << 16


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and to validate on.

    Attributes:
        train: the tokens to train on.
        validation: the tokens to validate on.
        train_starts: where the documents of `train` begin, int64.
        validation_starts: where the documents of `validation` begin, int64. Where a document lies on both sides, the
            rest of it counts as a document here.
        vocab_size: how many different tokens there may be.
        num_documents: documents on both sides together.
        description: where the text comes from, in words.
        digest: a short text that changes with the tokens, so that a checkpoint can tell on what it was trained.

    Examples:
        >>> import penstock as ps
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "story.txt"
        >>> _ = path.write_text("A rank runs its ops. " * 50)
        >>> corpus = ps.data.open_corpus(path)
        >>> corpus.vocab_size, len(corpus.train) > len(corpus.validation)
        (256, True)
    """

    train: Tokens
    validation: Tokens
    train_starts: NDArray[np.int64]
    validation_starts: NDArray[np.int64]
    vocab_size: int
    num_documents: int
    description: str
    digest: str

    @property
    def num_tokens(self) -> int:
        return int(self.train.size + self.validation.size)


def open_corpus(source: str | Path | None = None, tokenizer: Tokenizer | None = None) -> Corpus:
    """Opens a corpus.

    Args:
        source: a text file, a folder, a .jsonl file or a .bin/.idx pair; None for Python's standard library.
        tokenizer: bytes where not given. A `.bin/.idx` pair is tokenised already, so only its vocabulary counts
            there.

    Raises:
        DataError: there is no text, or it cannot be read.

    Examples:
        >>> import penstock as ps
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "story.txt"
        >>> _ = path.write_text("A rank runs its ops. " * 50)
        >>> corpus = ps.data.open_corpus(path)
        >>> corpus.num_documents, bytes(corpus.train[:6].tolist())
        (1, b'A rank')
    """
    tokenizer = tokenizer or ByteTokenizer()
    prefix = index_prefix(source) if source is not None else None
    if prefix is not None:
        return _mapped(prefix, tokenizer)
    train: list[Tokens] = []
    validation: list[Tokens] = []
    num_documents, passed_over = 0, list[str]()
    for document, tokens in _tokenized(source, tokenizer, passed_over):
        (validation if document.is_validation else train).append(tokens)
        num_documents += 1
    dtype = token_dtype(tokenizer.vocab_size)
    if num_documents >= MIN_DOCUMENTS and train and validation:
        rows = _join(train, dtype), _join(validation, dtype)
        starts = _starts(train), _starts(validation)
    else:
        tokens = _join(train + validation, dtype)
        cut = _cut(tokens.size)
        rows = tokens[:cut], tokens[cut:]
        starts = _split(_starts(train + validation), cut)
    size, text = sum(row.size for row in rows), "the Python standard library" if source is None else source
    end = tokenizer.end_of_document
    ends = "no token ends a document" if end is None else f"{tokenizer.decode([end])!r} ends a document"
    return Corpus(
        *rows,
        *starts,
        vocab_size=tokenizer.vocab_size,
        num_documents=num_documents,
        description=f"{text}: {num_documents:,} documents, {size:,} tokens ({tokenizer.name}; {ends})"
        + words_of_passed_over(passed_over),
        digest=_digest(tokenizer.name.encode(), *(np.ascontiguousarray(row) for row in rows)),
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written: the pair `<prefix>.bin` and `<prefix>.idx`.

    Attributes:
        prefix: the path of the pair without `.bin` or `.idx`.
        num_documents: documents in it.
        num_tokens: tokens in it.
        num_text_bytes: bytes of the text that they were made of.
        passed_over: the files of a folder that are empty or no text, and so not in it.
        dtype: the type that a token is stored in.
        seconds: how long it took.

    Examples:
        >>> import penstock as ps
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "story.txt").write_text("A rank runs its ops.")
        >>> made = ps.data.prepare(folder / "story.txt", folder / "corpus", ps.data.ByteTokenizer())
        >>> made.num_documents, made.num_tokens, made.dtype
        (1, 21, 'uint8')
    """

    prefix: Path
    num_documents: int
    num_tokens: int
    num_text_bytes: int
    passed_over: list[str]
    dtype: str
    seconds: float


def prepare(source: str | Path | None, output_prefix: str | Path, tokenizer: Tokenizer) -> Summary:
    """Tokenises a source into `<output_prefix>.bin` and `.idx`, as `open_corpus` would.

    If it fails, whatever was at the prefix before is untouched.

    Args:
        source: as in `open_corpus`; None for Python's standard library.
        output_prefix: the path of the pair without `.bin` or `.idx`.
        tokenizer: makes tokens of the text.

    Raises:
        DataError: the source cannot be read, or the pair cannot be written.

    Examples:
        >>> import penstock as ps
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "story.txt").write_text("A rank runs its ops.")
        >>> made = ps.data.prepare(folder / "story.txt", folder / "corpus", ps.data.ByteTokenizer())
        >>> made.num_documents, (folder / "corpus.bin").exists()
        (1, True)
    """
    began = time.perf_counter()
    num_text_bytes, passed_over = 0, list[str]()
    with IndexedWriter(output_prefix, tokenizer.vocab_size) as writer:
        for document, tokens in _tokenized(source, tokenizer, passed_over):
            writer.add(tokens)
            num_text_bytes += len(document.text)
    return Summary(
        prefix=writer.prefix,
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        num_text_bytes=num_text_bytes,
        passed_over=passed_over,
        dtype=writer.dtype.name,
        seconds=time.perf_counter() - began,
    )


def words_of_passed_over(names: Sequence[str]) -> str:
    """The end of a line on a folder whose text was read: how many of its files were not. Empty if all were."""
    files = f"{len(names):,} files, such as" if len(names) > 1 else "1 file,"
    return f"; passed over as empty or no text: {files} {names[0]}" if names else ""


def _tokenized(
    source: str | Path | None, tokenizer: Tokenizer, passed_over: list[str]
) -> Iterator[tuple[Document, Tokens]]:
    """The documents of a source with their tokens, each with the tokenizer's end-of-document token if it has one."""
    end = tokenizer.end_of_document
    for document in open_documents(source, passed_over):
        tokens = np.asarray(tokenizer.encode(document.text))
        yield document, tokens if end is None else np.append(tokens, np.asarray(end, tokens.dtype))


def open_documents(source: str | Path | None, passed_over: list[str]) -> Iterator[Document]:
    """The documents of any source of text, in their fixed order; `DataError` as for `open_corpus`.

    The names of files of a folder that are empty or no text are added to `passed_over`.
    """
    if source is None:
        return stdlib_documents()
    path = Path(source)
    if index_prefix(path) is not None:
        raise DataError(f"{path}: holds tokens, not text. Name the text it was prepared from.")
    if path.is_dir():
        return folder_documents(path, passed_over)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder. Give text, a folder, .jsonl or a .bin/.idx pair.")
    if is_jsonl(path):
        return jsonl_documents(path)
    return iter([text_document(path)])


def _mapped(prefix: Path, tokenizer: Tokenizer) -> Corpus:
    pair = IndexedTokens(prefix)
    tokens = pair.tokens
    cut = pair.start(_cut(len(pair))) if len(pair) >= MIN_DOCUMENTS else 0
    if cut in (0, tokens.size):
        cut = _cut(tokens.size)
    count = f"{len(pair):,} documents, {pair.num_tokens:,} tokens"
    # Reading all of a large file for a digest would undo the mapping: its index and three samples do.
    middle = tokens.size // 2
    samples = [tokens[:SAMPLE], tokens[middle : middle + SAMPLE], tokens[-SAMPLE:]]
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    return Corpus(
        train=tokens[:cut],
        validation=tokens[cut:],
        **dict(zip(("train_starts", "validation_starts"), _split(pair.starts, cut), strict=True)),
        vocab_size=tokenizer.vocab_size,
        num_documents=len(pair),
        description=f"{prefix}.bin: {count} ({pair.dtype.name})",
        digest=_digest(index, *(np.ascontiguousarray(sample) for sample in samples)),
    )


def _join(rows: list[Tokens], dtype: np.dtype[np.integer]) -> Tokens:
    # The empty row is for the case of no rows at all.
    return np.concatenate([np.zeros(0, dtype), *(row.astype(dtype, copy=False) for row in rows)])


def _starts(rows: list[Tokens]) -> NDArray[np.int64]:
    """Where each document begins, those without tokens left out."""
    sizes = np.array([row.size for row in rows if row.size], np.int64)
    return np.cumsum(sizes) - sizes


def _split(starts: NDArray[np.int64], cut: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where documents begin before and after a cut; what lies behind it begins there."""
    after = starts[starts > cut] - cut
    return starts[starts < cut], np.concatenate([np.zeros(1, np.int64), after])


def _cut(size: int) -> int:
    """Where the last twentieth of `size` things begins: at least one of them, never all."""
    return max(min(size - size // VALIDATION_ONE_IN, size - 1), min(size, 1))


def _digest(*parts: bytes | Tokens) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else part.tobytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
