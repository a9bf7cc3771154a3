"""Text to a `.bin`/`.idx` pair, once, so that a large corpus is mapped and not tokenised at every start."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.data.corpus import open_documents
from penstock.data.errors import DataError
from penstock.data.megatron import IndexedWriter
from penstock.data.tokenizer import Tokenizer

__all__ = ["Summary", "prepare"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written: the pair `<prefix>.bin` and `<prefix>.idx`.

    Attributes:
        prefix: the path of the pair without `.bin` or `.idx`.
        num_documents: documents in it.
        num_tokens: tokens in it.
        num_text_bytes: bytes of the text that they were made of.
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
    dtype: str
    seconds: float


def prepare(
    source: str | Path | None, output_prefix: str | Path, tokenizer: Tokenizer, append_eod: bool = True
) -> Summary:
    """Tokenises a source into `<output_prefix>.bin` and `.idx`.

    If it fails, whatever was at the prefix before is untouched.

    Args:
        source: as in `open_corpus`; None for Python's standard library.
        output_prefix: the path of the pair without `.bin` or `.idx`.
        tokenizer: makes tokens of the text.
        append_eod: whether each document ends with the tokenizer's end-of-document token.

    Raises:
        DataError: the source cannot be read, or the tokenizer has no such token.

    Examples:
        >>> import penstock as ps
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "story.txt").write_text("A rank runs its ops.")
        >>> made = ps.data.prepare(folder / "story.txt", folder / "corpus", ps.data.ByteTokenizer())
        >>> made.num_documents, (folder / "corpus.bin").exists()
        (1, True)
    """
    end = tokenizer.end_of_document
    if append_eod and end is None:
        raise DataError(
            f"tokenizer {tokenizer.name} has no end-of-document token such as <|endoftext|> to append. "
            "Prepare without it."
        )
    began = time.perf_counter()
    num_text_bytes = 0
    with IndexedWriter(output_prefix, tokenizer.vocab_size) as writer:
        for document in open_documents(source):
            tokens = tokenizer.encode(document.text)
            writer.add(np.append(tokens, np.asarray(end, tokens.dtype)) if append_eod else tokens)
            num_text_bytes += len(document.text)
        counts = writer.num_documents, writer.num_tokens
    return Summary(
        prefix=writer.prefix,
        num_documents=counts[0],
        num_tokens=counts[1],
        num_text_bytes=num_text_bytes,
        dtype=writer.dtype.name,
        seconds=time.perf_counter() - began,
    )
