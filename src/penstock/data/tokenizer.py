"""Text to token numbers and back: plain bytes by default, or any `tokenizers` JSON file.

Bytes need no download, no training and no dependency, and they can spell every text, so they are what
`penstock train` uses unless told otherwise. The `tokenizers` package is imported only when a file is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.data.tokens import DataError, Tokens, token_dtype
from penstock.extras import what_to_install

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "<eod>", "[SEP]")
"""Tokens that end a document, where no tokenizer_config.json says which one does. The first that a vocabulary has
counts: Gemma's has the tag `</s>` of HTML too.
"""


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of `data` needs of a tokenizer.

    Attributes:
        name: shown to users.
        vocab_size: how many different tokens there are.
        end_of_document: the token that ends a document; None where there is none.

    Examples:
        >>> import penstock as ps
        >>> class Words:
        ...     name, vocab_size, end_of_document = "words", 3, 0
        ...     def encode(self, text):
        ...         return [("rank", "stage").index(word) + 1 for word in text.split()]
        >>> tokenizer: ps.data.Tokenizer = Words()
        >>> tokenizer.encode("stage rank")
        [2, 1]
    """

    name: str
    vocab_size: int
    end_of_document: int | None

    def encode(self, text: bytes | str) -> Tokens: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """256 tokens, one a byte. The zero byte, which no text contains, ends a document.

    Examples:
        >>> import penstock as ps
        >>> tokenizer = ps.data.ByteTokenizer()
        >>> tokenizer.vocab_size, tokenizer.encode("Hi").tolist(), tokenizer.end_of_document
        (256, [72, 105], 0)
    """

    name = "bytes"
    vocab_size = 256
    end_of_document: int | None = 0

    def encode(self, text: bytes | str) -> Tokens:
        """The bytes of `text` (UTF-8 for a str) as uint8[T]."""
        data = text.encode("utf-8") if isinstance(text, str) else bytes(text)
        return np.frombuffer(data, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text the bytes spell; a letter cut in two, as at the end of a sample, becomes U+FFFD."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer read from a `tokenizers` JSON file; make one with `load_tokenizer`."""

    def __init__(self, inner: Any, name: str, ends: Sequence[str]) -> None:
        self._inner = inner
        self.name = name
        numbers: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        # Numbers may have holes, so the size is the highest number plus one and not the count of tokens.
        self.vocab_size = max(numbers.values(), default=-1) + 1
        self.end_of_document: int | None = next((numbers[word] for word in ends if word in numbers), None)

    def number_of(self, word: str) -> int | None:
        """The number of a token; None where it has no such token."""
        number: int | None = self._inner.token_to_id(word)
        return number

    def encode(self, text: bytes | str) -> Tokens:
        """Tokens[T] of `text`, without the special tokens a tokenizer may add around it."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        ids = self._inner.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._inner.decode([int(token) for token in tokens], skip_special_tokens=False))


def load_tokenizer(path: str | Path) -> FileTokenizer:
    """Reads a JSON file of Hugging Face's `tokenizers`.

    If a tokenizer_config.json lies beside it, the `eos_token` there ends a document.

    Args:
        path: the file, or a folder that has it as tokenizer.json.

    Raises:
        DataError: the file or the package is missing or broken.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.data.load_tokenizer("no-such-tokenizer.json")
        ... except ps.data.DataError as error:
        ...     print("no-such-tokenizer.json" in str(error))
        True
    """
    path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise DataError(
            f"{path}: no such tokenizer file. Give the tokenizer.json of a tokenizer; without one, bytes are tokens."
        )
    try:
        from tokenizers import Tokenizer as Reader
    except ImportError as error:
        raise DataError(f"{path}: {what_to_install(error) or error}") from None
    try:
        inner = Reader.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for anything wrong in the file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path}: not a tokenizers JSON file ({reason}). Give the tokenizer.json saved by that package."
        ) from None
    tokenizer = FileTokenizer(inner, path.name, (*_configured_end(path.parent), *END_OF_DOCUMENT))
    if tokenizer.vocab_size == 0:
        raise DataError(f"{path}: this tokenizer has no tokens. Train it, then save it again.")
    return tokenizer


def _configured_end(folder: Path) -> list[str]:
    """The `eos_token` of the tokenizer_config.json in a folder: a text, or an object with it as `content`. Empty if
    there is none.
    """
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    word = found.get("content") if isinstance(found, dict) else found
    return [word] if isinstance(word, str) else []
