"""The .bin/.idx pair: byte for byte what Megatron reads, and every contradiction in one found."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from penstock.data import DataError, IndexedTokens, IndexedWriter

pytestmark = pytest.mark.unit


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 256) -> IndexedTokens:
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.asarray(document))
    return IndexedTokens(prefix)


def index(
    lengths: list[int],
    offsets: list[int],
    boundaries: list[int],
    modes: list[int] | None = None,
    code: int = 8,
) -> bytes:
    """An index put together by hand from the format's description."""
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
        + struct.pack(f"<{len(lengths)}i{len(offsets)}q{len(boundaries)}q", *lengths, *offsets, *boundaries)
        + struct.pack(f"<{len(modes or [])}b", *(modes or []))
    )


def lay(tmp_path: Path, raw_index: bytes, raw_tokens: bytes) -> Path:
    (tmp_path / "c.idx").write_bytes(raw_index)
    (tmp_path / "c.bin").write_bytes(raw_tokens)
    return tmp_path / "c"


def test_the_written_bytes_are_the_formats_bytes(tmp_path: Path) -> None:
    write(tmp_path / "c", [[1, 2, 3], [], [700]], vocab_size=1000)
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 700)
    assert (tmp_path / "c.idx").read_bytes() == index([3, 0, 1], [0, 6, 6], [0, 1, 2, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


def test_documents_of_several_sequences_are_read_and_modes_passed_over(tmp_path: Path) -> None:
    raw = struct.pack("<6i", 5, 6, 7, 8, 9, 10)
    pair = IndexedTokens(lay(tmp_path, index([2, 1, 3], [0, 8, 12], [0, 2, 3], [0, 1, 0], code=4), raw))
    assert [document.tolist() for document in pair] == [[5, 6, 7], [8, 9, 10]]
    assert (len(pair), pair.num_tokens, pair.dtype.name) == (2, 6, "int32")
    assert pair[-1].tolist() == [8, 9, 10]
    assert pair.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    with pytest.raises(IndexError, match=r"document 2 of .* which has 2"):
        pair[2]


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_every_integer_type_is_read(tmp_path: Path, code: int, letter: str) -> None:
    raw = struct.pack(f"<3{letter}", 1, 2, 100)
    pair = IndexedTokens(lay(tmp_path, index([3], [0], [0, 1], code=code), raw))
    assert pair[0].tolist() == [1, 2, 100]


GOOD = struct.pack("<4H", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("raw_index", "raw_tokens", "message"),
    [
        (b"", GOOD, r"c\.idx: the header is 34 bytes, the file has 0"),
        (b"MMIDIDX\0\0" + bytes(20), GOOD, r"c\.idx: the header is 34 bytes, the file has 29"),
        (
            b"PK" + index([4], [0], [0, 1])[2:],
            GOOD,
            r"c\.idx: at byte 0, expected the magic .*found b'PKIDIDX",
        ),
        (index([4], [0], [0, 1], code=0), GOOD, r"at byte 17, expected a dtype code of integers .*, found 0"),
        (
            index([4], [0], [0, 1], code=7),
            GOOD,
            r"at byte 17, expected a dtype code .*\(1, 2, 3, 4, 5, 8\), found 7",
        ),
        (index([], [], [0, 0]), GOOD, r"at byte 18, expected at least one sequence, found 0"),
        (index([4], [0], [0]), GOOD, r"at byte 26, expected at least 2 document boundaries, found 1"),
        (index([4], [0], [0, 1]) + b"xy", GOOD, r"at byte 18, 1 sequences .* make 62 bytes, or 63 .* has 64"),
        (index([-4], [0], [0, 1]), GOOD, r"at byte 34, expected a length of at least 0 for sequence 0, found -4"),
        (index([2, 2], [0, 5], [0, 2]), GOOD, r"at byte 50, expected sequence 1 to begin at byte 4 .* found 5"),
        (index([2, 2], [0, 4], [1, 2]), GOOD, r"at byte 58, expected document boundary 0 to be 0, found 1"),
        (index([2, 2], [0, 4], [0, 3, 2]), GOOD, r"boundary 2 to be at least 3, .* found 2"),
        (index([2, 2], [0, 4], [0, 1]), GOOD, r"boundary 1 to be 2, the number of sequences, found 1"),
        (index([4], [0], [0, 1]), GOOD[:-1], r"c\.bin: c\.idx expects 8 bytes \(4 uint16 .* has 7"),
        (index([4], [0], [0, 1]), GOOD + b"x", r"c\.bin: c\.idx expects 8 bytes .* the file has 9"),
        (index([4], [0], [0, 1], code=4), GOOD, r"c\.bin: c\.idx expects 16 bytes .* the file has 8"),
        (index([0], [0], [0, 1]), b"", r"c\.bin: the file is empty"),
    ],
)
def test_contradictions_name_file_byte_expected_and_found(
    tmp_path: Path, raw_index: bytes, raw_tokens: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        IndexedTokens(lay(tmp_path, raw_index, raw_tokens))


def test_another_version_is_named(tmp_path: Path) -> None:
    raw = bytearray(index([4], [0], [0, 1]))
    raw[9] = 2
    with pytest.raises(DataError, match="at byte 9, expected version 1, found 2"):
        IndexedTokens(lay(tmp_path, bytes(raw), GOOD))


@pytest.mark.parametrize("missing", ["c.bin", "c.idx"])
def test_half_a_pair_names_the_missing_half(tmp_path: Path, missing: str) -> None:
    write(tmp_path / "c", [[1]])
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=rf"{missing}: no such file"):
        IndexedTokens(tmp_path / "c.bin")


def test_a_negative_token_is_found_when_read(tmp_path: Path) -> None:
    pair = IndexedTokens(lay(tmp_path, index([1, 2], [0, 2], [0, 1, 2], code=3), struct.pack("<3h", 1, 2, -7)))
    assert pair[0].tolist() == [1]
    with pytest.raises(DataError, match=r"c\.bin: at byte 4, token -7"):
        pair[1]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([0, 256], "token 256 outside the vocabulary of 256"),
        ([-1], "token -1 outside"),
        ([[1]], "must be a row of integers"),
        ([0.5], "must be a row of integers"),
    ],
)
def test_the_writer_refuses_what_is_no_document_and_leaves_nothing(
    tmp_path: Path, document: list[int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write(tmp_path / "c", [[1], document])
    assert list(tmp_path.iterdir()) == []


def test_the_writer_refuses_to_write_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokens to write"):
        write(tmp_path / "c", [[], []])
    assert list(tmp_path.iterdir()) == []


def test_the_writer_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/c: cannot be written"):
        write(tmp_path / "file" / "c", [[1]])


def test_a_kill_between_the_two_renames_never_pairs_an_old_index_with_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "c", [[1, 2], [3]])
    moves: list[str] = []

    def die_at_second(self: Path, target: Path) -> Path:
        moves.append(target.name)
        if len(moves) == 2:
            raise KeyboardInterrupt
        return real(self, target)

    real = Path.replace
    monkeypatch.setattr(Path, "replace", die_at_second)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "c", [[4], [5, 6]])
    assert moves == ["c.bin", "c.idx"]
    with pytest.raises(DataError, match=r"c\.idx: no such file"):
        IndexedTokens(tmp_path / "c")
