"""Megatron's `.bin`/`.idx` pair, read memory-mapped and written whole.

The `.bin` holds tokens and nothing else; the `.idx` says where documents begin:

    byte 0   magic "MMIDIDX" and two zero bytes
         9   <Q  version, 1
        17   <B  dtype code of the tokens
        18   <Q  number of sequences N
        26   <Q  number of document boundaries D (documents + 1)
        34   int32[N] sequence lengths, int64[N] byte offsets, int64[D] boundaries, optionally int8[N] modes

Nothing in the pair carries a checksum, so the reader checks every number against every other: the sizes of
both files follow from the header, each sequence must begin where the last one ended, and the last must end where
the `.bin` does. A wrong byte in the header, the lengths or the offsets is then an error and not other tokens.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.data.dtype import Tokens, token_dtype
from penstock.data.errors import DataError

__all__ = ["IndexedTokens", "IndexedWriter", "index_prefix"]

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}


def index_prefix(path: str | Path) -> Path | None:
    """The path without `.bin` or `.idx` if it names such a pair, by its ending or by the files beside it."""
    path = Path(path)
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    return path if not path.exists() and _file(path, ".idx").is_file() else None


class IndexedTokens(Sequence[Tokens]):
    """The documents of a `.bin`/`.idx` pair, memory-mapped: `len`, `[i]` and `tokens`, all of them in a row.

    `modes` is Megatron's optional int8 for each sequence (None without).

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
    modes: NDArray[np.int8] | None

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = index_prefix(prefix) or Path(prefix)
        index, data = _file(self.prefix, ".idx"), _file(self.prefix, ".bin")
        for path in (index, data):
            if not path.is_file():
                raise DataError(f"{path}: no such file. A prepared corpus is a pair, {data.name} and {index.name}.")
        raw = _map(index, np.dtype("u1"))
        self.dtype, num_sequences, num_boundaries = _header(index, raw)
        at = _Layout(num_sequences, num_boundaries)
        if raw.size not in (at.modes, at.end):
            raise DataError(
                f"{index}: at byte 18, {num_sequences} sequences and {num_boundaries} document boundaries "
                f"make {at.modes} bytes, or {at.end} with modes; the file has {raw.size}. {_REMAKE}"
            )
        lengths: NDArray[np.int32] = raw[at.lengths : at.offsets].view("<i4")
        offsets: NDArray[np.int64] = raw[at.offsets : at.boundaries].view("<i8")
        self._boundaries: NDArray[np.int64] = raw[at.boundaries : at.modes].view("<i8")
        self.modes = raw[at.modes :].view("i1") if raw.size == at.end else None
        ends = _sequence_ends(index, at, lengths, offsets, self.dtype.itemsize)
        _check_boundaries(index, at, self._boundaries, num_sequences)
        size = data.stat().st_size
        if size != ends[-1] * self.dtype.itemsize:
            raise DataError(
                f"{data}: {index.name} expects {ends[-1] * self.dtype.itemsize} bytes "
                f"({ends[-1]} {self.dtype.name} tokens), the file has {size}. {_REMAKE}"
            )
        if size == 0:
            raise DataError(f"{data}: the file is empty. Prepare it from a source with text in it.")
        self.tokens = _map(data, self.dtype)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends])

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

    def __iter__(self) -> Iterator[Tokens]:
        return (self[document] for document in range(len(self)))

    def __repr__(self) -> str:
        counts = f"{len(self)} documents, {self.num_tokens} {self.dtype.name} tokens"
        return f"IndexedTokens({str(self.prefix)!r}: {counts})"


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
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._partial[0], "wb")
        except OSError as error:
            raise DataError(
                f"{self.prefix}: cannot be written ({error.strerror or error}). Give a place that can be."
            ) from None
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


_REMAKE = "Copy or prepare the pair again."


class _Layout:
    """Byte positions of the arrays in an `.idx`."""

    def __init__(self, num_sequences: int, num_boundaries: int) -> None:
        self.lengths = HEADER.size
        self.offsets = self.lengths + 4 * num_sequences
        self.boundaries = self.offsets + 8 * num_sequences
        self.modes = self.boundaries + 8 * num_boundaries
        self.end = self.modes + num_sequences


def _header(path: Path, raw: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    if raw.size < HEADER.size:
        raise DataError(f"{path}: the header is {HEADER.size} bytes, the file has {raw.size}. {_REMAKE}")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(f"{path}: at byte 0, expected the magic {MAGIC!r}, found {magic!r}. Not a Megatron index.")
    if version != VERSION:
        raise DataError(f"{path}: at byte 9, expected version {VERSION}, found {version}. {_REMAKE}")
    if code not in DTYPES:
        raise DataError(f"{path}: at byte 17, expected a dtype code from 1 to 8, found {code}. {_REMAKE}")
    dtype = np.dtype(DTYPES[code])
    if dtype.kind == "f":
        raise DataError(f"{path}: at byte 17, dtype {code} is {dtype.name}; tokens are integers. {_REMAKE}")
    if num_sequences == 0:
        raise DataError(f"{path}: at byte 18, expected at least one sequence, found 0. {_REMAKE}")
    if num_boundaries < 2:
        raise DataError(
            f"{path}: at byte 26, expected at least 2 document boundaries, found {num_boundaries}. {_REMAKE}"
        )
    return dtype, num_sequences, num_boundaries


def _sequence_ends(
    path: Path, at: _Layout, lengths: NDArray[np.int32], offsets: NDArray[np.int64], itemsize: int
) -> NDArray[np.int64]:
    """Where each sequence ends in tokens, having checked that each begins where the last one ended."""
    if lengths.min() < 0:
        i = int(np.argmax(lengths < 0))
        where = at.lengths + 4 * i
        raise DataError(f"{path}: at byte {where}, sequence {i} has the length {lengths[i]}, below 0. {_REMAKE}")
    ends = np.cumsum(lengths, dtype=np.int64)
    expected = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) * itemsize
    wrong = offsets != expected
    if wrong.any():
        i = int(np.argmax(wrong))
        raise DataError(
            f"{path}: at byte {at.offsets + 8 * i}, sequence {i} should begin at byte {expected[i]} of the "
            f".bin, where the one before it ends; found {offsets[i]}. {_REMAKE}"
        )
    return ends


def _check_boundaries(path: Path, at: _Layout, boundaries: NDArray[np.int64], num_sequences: int) -> None:
    def fail(i: int, expected: str) -> None:
        where = f"{path}: at byte {at.boundaries + 8 * i}, document boundary {i}"
        raise DataError(f"{where}: expected {expected}, found {boundaries[i]}. {_REMAKE}")

    if boundaries[0] != 0:
        fail(0, "0")
    falls = boundaries[1:] < boundaries[:-1]
    if falls.any():
        i = int(np.argmax(falls)) + 1
        fail(i, f"at least {boundaries[i - 1]}, the boundary before it")
    if boundaries[-1] != num_sequences:
        fail(len(boundaries) - 1, f"{num_sequences}, the number of sequences")


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
