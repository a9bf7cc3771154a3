"""The digest of a batch: another one for whatever else is given, the same for the same wherever it lies."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from penstock.runtime.tensors.digest import batch_digest, bytes_of, hash_of

pytestmark = pytest.mark.unit

TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (300, 301)])
def test_any_element_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).mul(3).to(dtype)
    found = {hash_of(x)}
    flat = x.reshape(-1)
    places = sorted({0, 1, len(flat) // 2, len(flat) - 1} & set(range(len(flat))))
    for place in places:
        other = flat.clone()
        other[place] = ~other[place] if dtype is torch.bool else other[place] + 1
        found.add(hash_of(other.view(shape)))
    assert len(found) == len(places) + 1


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_order_counts(dtype: torch.dtype) -> None:
    """Samples of round numbers, whose bits are mostly zeros, in other orders."""
    x = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]]).repeat(9, 5000).to(dtype)
    assert len({hash_of(x.roll(by, 0)) for by in range(4)}) == 4
    assert len({hash_of(x[order]) for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0])}) == 4


def test_the_layout_does_not_count() -> None:
    x = torch.randn(40, 60)
    assert hash_of(x) == hash_of(x.t().contiguous().t()) == hash_of(torch.cat([x, x], 1)[:, :60])
    assert hash_of(x) == hash_of(torch.cat([torch.zeros(1), x.reshape(-1)])[1:].view(40, 60))
    c = torch.complex(x, x)
    assert hash_of(c.conj()) == hash_of(c.conj().resolve_conj()) != hash_of(c)
    assert hash_of(x[:1].expand(3, 60)) == hash_of(x[:1].repeat(3, 1))


def test_rows_count_as_well_as_what_is_in_them() -> None:
    x = torch.arange((1 << 14) * 40 + 77)
    found = {hash_of(x)}
    for by in (1, 1 << 14, (1 << 14) * 4):
        found.add(hash_of(x.roll(by)))
    assert len(found) == 4


def test_arrangement_shape_and_type_count() -> None:
    x, y = torch.ones(4, 6), torch.zeros(4, 6)
    given = [
        (x, y), (y, x), (x, x), ((x, y),), ([x, y],), ({"a": x, "b": y},), ({"b": x, "a": y},), (x.view(6, 4), y),
        (x.double(), y), (x, None), (x, 3), (x, 4), (torch.zeros(0, 3),), (torch.zeros(3, 0),), (torch.tensor(1.0),),
    ]  # fmt: skip
    digests = [batch_digest(*values) for values in given]
    assert len(set(digests)) == len(digests)
    assert digests == [batch_digest(*values) for values in given]
    assert all(float(digest) == digest for digest in digests)
    assert all(a != b for a, b in pairwise(digests))


@pytest.mark.parametrize("size", [5, 1 << 17])
def test_bug_memory_whose_digest_was_made_could_get_no_other_size(size: int) -> None:
    x = torch.zeros(size, dtype=torch.float32)
    for tensor in (x, x.bfloat16()):
        hash_of(tensor)
        bytes(bytes_of(tensor))
        assert tensor.untyped_storage().resizable()
