"""Megatron's `.bin`/`.idx` pair, read memory-mapped and written whole.

The `.bin` holds tokens and nothing else; the `.idx` says where documents begin:

    byte 0   magic "MMIDIDX" and two zero bytes
         9   <Q  version, 1
        17   <B  dtype code of the tokens
        18   <Q  number of sequences N
        26   <Q  number of document boundaries D (documents + 1)
        34   int32[N] sequence lengths, int64[N] byte offsets, int64[D] boundaries, optionally int8[N] modes

The pair has no checksum, so the reader checks every number against every other. The sizes of both files follow from
the header, each sequence must begin where the one before it ended, and the last must end where the `.bin` does. A
wrong byte in the header, the lengths or the offsets is then an error and not other tokens. Modes are passed over.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.data.tokens import DataError, Tokens, token_dtype

__all__ = ["IndexedTokens", "IndexedWriter", "index_prefix"]

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""The types of tokens, by code. Codes 6 and 7 are of floating-point numbers."""
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
_REMAKE = "Copy or prepare the pair again."


def index_prefix(path: str | Path) -> Path | None:
    """The path without `.bin` or `.idx` if it names such a pair, by its ending or by the files beside it."""
    path = Path(path)
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    return path if not path.exists() and _file(path, ".idx").is_file() else None


class IndexedTokens(Sequence[Tokens]):
    """The documents of a `.bin`/`.idx` pair, memory-mapped: `len`, `[i]` and `tokens`, all of them in a row.

    Args:
        prefix: the path of the pair without `.bin` or `.idx`.

    Raises:
        DataError: it names the file, the byte, what was expected and what was found.

    Examples:
        >>> import penstock as ps
        >>> import tempfile, pathlib
        >>> prefix = pathlib.Path(tempfile.mkdtemp()) / "corpus"
        >>> with ps.data.IndexedWriter(prefix, vocab_size=256) as writer:
        ...     writer.add([1, 2, 3])
        ...     writer.add([4, 5])
        >>> documents = ps.data.IndexedTokens(prefix)
        >>> len(documents), documents[1].tolist(), documents.tokens.tolist()
        (2, [4, 5], [1, 2, 3, 4, 5])
    """

    dtype: np.dtype[Any]
    tokens: Tokens

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = index_prefix(prefix) or Path(prefix)
        index, data = _file(self.prefix, ".idx"), _file(self.prefix, ".bin")
        for path in (index, data):
            if not path.is_file():
                raise DataError(f"{path}: no such file. A prepared corpus is a pair, {data.name} and {index.name}.")
        self.dtype, self._starts, self._boundaries = _read_index(index)
        size, expected = data.stat().st_size, int(self._starts[-1]) * self.dtype.itemsize
        if size != expected:
            raise DataError(
                f"{data}: {index.name} expects {expected} bytes ({self._starts[-1]} {self.dtype.name} tokens), the "
                f"file has {size}. {_REMAKE}"
            )
        if size == 0:
            raise DataError(f"{data}: the file is empty. Prepare it from a source with text in it.")
        self.tokens = _map(data, self.dtype)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.size)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self._boundaries) - 1

    @property
    def starts(self) -> NDArray[np.int64]:
        """The positions in `tokens` of the first tokens of all documents that have any, ascending."""
        return np.unique(self._starts[self._boundaries[:-1]][np.diff(self._starts[self._boundaries]) > 0])

    def start(self, document: int) -> int:
        """The position in `tokens` of a document's first token; of the end, for `document == len(self)`."""
        return int(self._starts[self._boundaries[document]])

    def __getitem__(self, document: int) -> Tokens:  # type: ignore[override]
        """The tokens of one document, a view of the mapped file; `DataError` if any is negative."""
        if not -len(self) <= document < len(self):
            raise IndexError(f"document {document} of {self.prefix}, which has {len(self)}")
        document %= len(self)
        first = self.start(document)
        tokens = self.tokens[first : self.start(document + 1)]
        if tokens.dtype.kind == "i" and tokens.size and tokens.min() < 0:
            position = first + int(np.argmax(tokens < 0))
            raise DataError(
                f"{_file(self.prefix, '.bin')}: at byte {position * self.dtype.itemsize}, token "
                f"{self.tokens[position]}; tokens count from 0, so the file or its dtype is damaged. {_REMAKE}"
            )
        return tokens

    def __repr__(self) -> str:
        counts = f"{len(self)} documents, {self.num_tokens} {self.dtype.name} tokens"
        return f"IndexedTokens({str(self.prefix)!r}: {counts})"


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Reads an `.idx` whose numbers agree with each other.

    Returns:
        The type of the tokens; where each sequence begins, and the last one ends, in tokens; the first sequence of
        each document, and the number of all sequences.

    Raises:
        DataError: numbers disagree. It names the byte, the rule and the number.
    """
    raw = _map(path, np.dtype("u1"))
    if raw.size < HEADER.size:
        raise DataError(f"{path}: the header is {HEADER.size} bytes, the file has {raw.size}. {_REMAKE}")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())

    def require(is_right: bool, byte: int, expected: str, found: Any) -> None:
        if not is_right:
            raise DataError(f"{path}: at byte {byte}, expected {expected}, found {found}. {_REMAKE}")

    def require_each(right: NDArray[np.bool_], begin: int, array: NDArray[Any], rule: Callable[[int], str]) -> None:
        if not right.all():
            wrong = int(np.argmin(right))
            require(False, begin + array.itemsize * wrong, rule(wrong), array[wrong])

    require(magic == MAGIC, 0, f"the magic {MAGIC!r} of a Megatron index", repr(magic))
    require(version == VERSION, 9, f"version {VERSION}", version)
    require(code in DTYPES, 17, f"a dtype code of integers ({', '.join(map(str, DTYPES))})", code)
    require(num_sequences > 0, 18, "at least one sequence", num_sequences)
    require(num_boundaries > 1, 26, "at least 2 document boundaries", num_boundaries)
    offsets_at = HEADER.size + 4 * num_sequences
    boundaries_at = offsets_at + 8 * num_sequences
    end = boundaries_at + 8 * num_boundaries
    if raw.size not in (end, end + num_sequences):
        raise DataError(
            f"{path}: at byte 18, {num_sequences} sequences and {num_boundaries} document boundaries make {end} "
            f"bytes, or {end + num_sequences} with modes; the file has {raw.size}. {_REMAKE}"
        )
    dtype = np.dtype(DTYPES[code])
    lengths: NDArray[np.int32] = raw[HEADER.size : offsets_at].view("<i4")
    offsets: NDArray[np.int64] = raw[offsets_at:boundaries_at].view("<i8")
    boundaries: NDArray[np.int64] = raw[boundaries_at:end].view("<i8")
    require_each(lengths >= 0, HEADER.size, lengths, lambda i: f"a length of at least 0 for sequence {i}")
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    begins = starts[:-1] * dtype.itemsize
    require_each(
        offsets == begins,
        offsets_at,
        offsets,
        lambda i: f"sequence {i} to begin at byte {begins[i]} of the .bin, where the one before it ends",
    )
    least = np.concatenate([np.zeros(1, np.int64), boundaries[:-1]])
    are_right = boundaries >= least
    are_right[0], are_right[-1] = boundaries[0] == 0, are_right[-1] and boundaries[-1] == num_sequences
    require_each(are_right, boundaries_at, boundaries, lambda i: _boundary_rule(i, boundaries, num_sequences))
    return dtype, starts, boundaries


def _boundary_rule(number: int, boundaries: NDArray[np.int64], num_sequences: int) -> str:
    if number == 0:
        return "document boundary 0 to be 0"
    before = int(boundaries[number - 1])
    if boundaries[number] < before:
        return f"document boundary {number} to be at least {before}, the boundary before it"
    return f"document boundary {number} to be {num_sequences}, the number of sequences"


class IndexedWriter:
    """Writes a pair document by document, as a context manager.

    Both files are written beside their places and moved there together at the end. So a kill or an exception leaves
        what was there before, or (between the two moves) a `.bin` without an `.idx`, which no reader takes for data.

    Args:
        prefix: the path of the pair without `.bin` or `.idx`.
        vocab_size: decides the type that tokens are stored in.

    Examples:
        >>> import penstock as ps
        >>> import tempfile, pathlib
        >>> prefix = pathlib.Path(tempfile.mkdtemp()) / "corpus"
        >>> with ps.data.IndexedWriter(prefix, vocab_size=256) as writer:
        ...     writer.add([1, 2, 3])
        >>> prefix.with_suffix(".bin").exists(), len(ps.data.IndexedTokens(prefix))
        (True, 1)
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self.prefix = index_prefix(prefix) or Path(prefix)
        self.dtype = token_dtype(vocab_size)
        self.vocab_size = vocab_size
        self._lengths: list[int] = []
        self._boundaries = [0]
        self._open = False

    @property
    def num_documents(self) -> int:
        return len(self._boundaries) - 1

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    def __enter__(self) -> IndexedWriter:
        mark = f".{os.getpid()}.partial"
        self._partial = [_file(self.prefix, ".bin" + mark), _file(self.prefix, ".idx" + mark)]
        with self._writing():
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._partial[0], "wb")
        self._open = True
        return self

    def add(self, tokens: Tokens) -> None:
        """Appends one document, tokens[T]; `DataError` for a token outside the vocabulary."""
        if not self._open:
            raise DataError(f"{self.prefix}: add() was called outside the writer's with block. Call it inside.")
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise DataError(f"a document of {array.dtype} {array.shape}; it must be a row of integers.")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.vocab_size:
            wrong = int(array.min()) if array.min() < 0 else int(array.max())
            raise DataError(f"token {wrong} outside the vocabulary of {self.vocab_size} tokens.")
        if array.size >= 2**31:
            raise DataError(f"a document of {array.size} tokens; the format holds at most 2**31 - 1. Split it.")
        with self._writing():
            self._bin.write(array.astype(self.dtype).tobytes())
        self._lengths.append(int(array.size))
        self._boundaries.append(len(self._lengths))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        try:
            if kind is None:
                if not self.num_tokens:
                    raise DataError(f"{self.prefix}: no tokens to write. Give a source with text in it.")
                with self._writing():
                    self._commit()
        finally:
            with contextlib.suppress(OSError):  # what could not be written is still in its buffer
                self._bin.close()
            for path in self._partial:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.prefix}: cannot be written ({error.strerror or error}). What was there before is untouched; "
                "make room, or give another place."
            ) from None

    def _commit(self) -> None:
        _sync(self._bin)
        lengths = np.asarray(self._lengths, dtype="<i4")
        offsets = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        offsets *= self.dtype.itemsize
        boundaries = np.asarray(self._boundaries, dtype="<i8")
        header = HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(boundaries))
        with open(self._partial[1], "wb") as file:
            file.write(header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())
            _sync(file)
        # An old index must never meet new tokens.
        _file(self.prefix, ".idx").unlink(missing_ok=True)
        self._partial[0].replace(_file(self.prefix, ".bin"))
        self._partial[1].replace(_file(self.prefix, ".idx"))


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The file as a read-only mapped array; an empty file, which cannot be mapped, as an empty array."""
    try:
        return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from None


def _file(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
