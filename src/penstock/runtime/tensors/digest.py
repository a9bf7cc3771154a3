"""A number for a batch, made of every element of it, so that ranks can tell whether all were given the same.

Words of 64 bits are folded, multiplied by odd random numbers, each place by its own, and added up modulo 2^64, row by
row until one row is left. That tells a changed element for certain, and samples in another order with as good as
certainty, at the speed of memory, wherever the tensor lies.

A `Sketch` is a few numbers that stand for a gradient: they tell how far it is from another one, without keeping
either. Each number is the sum of all elements with random signs. If two gradients differ by d, such sums differ by
about the norm of d. The signs of an element are a product of two, of its column and of its row in a matrix of rows of
`_COLUMNS` elements, so few signs are drawn.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.tensors.dtensor import local
from penstock.runtime.tensors.pytree import flatten

_ROW = 1 << 14
_FEW = 1 << 16
"""Bytes of a tensor up to which they are hashed one after the other."""


def batch_digest(*values: Any) -> int:
    """48 bits that differ, with as good as certainty, where anything in `values` does: elements, shapes, types or
    arrangement. Doubles hold them exactly.
    """
    known: dict[int, int] = {}
    parts: list[Any] = []
    for value in values:
        leaves, skeleton = flatten(value)
        parts.append(skeleton)
        for leaf in leaves:
            if id(leaf) not in known:
                known[id(leaf)] = hash_of(leaf)
            parts.append((tuple(leaf.shape), str(leaf.dtype), known[id(leaf)]))
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6])


def hash_of(tensor: Tensor) -> int:
    """64 bits that tell a tensor's elements from others of the same shape and type."""
    part = local(tensor.detach())
    if part.layout is not torch.strided:
        part = part.to_dense()
    part = part.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(part) if part.is_complex() else part).contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    if flat.numel() <= _FEW:  # then a hash of the bytes is quicker than the ops it would take
        return int.from_bytes(hashlib.blake2b(bytes_of(flat.cpu()), digest_size=8).digest())
    size = flat.numel() // 8 * 8
    rest = int.from_bytes(bytes(flat[size:].tolist()))
    return (_hash(flat[:size].view(torch.int64)) + rest * 0x9E3779B97F4A7C15) % (1 << 64)


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a contiguous tensor on the CPU, as they lie.

    `Tensor.numpy` would fix the size of the memory that the tensor lies in for good. Quantization-aware training, for
    one, gives its buffers their size in the first forward.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    held = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    held.tensor = tensor  # type: ignore[attr-defined] # which stays as long as somebody reads it
    return memoryview(held).cast("B")


def _hash(words: Tensor) -> int:
    """Of at least no word."""
    while words.numel() > _ROW:
        whole = words.numel() // _ROW * _ROW
        rows = words[:whole].view(-1, _ROW)
        step = 4 if words.is_cpu else 256
        sums = [_weighed(rows[at : at + step]) for at in range(0, len(rows), step)]
        words = torch.cat([*sums, words[whole:]])
    return int(_weighed(words[None]).item()) % (1 << 64)


def _weighed(rows: Tensor) -> Tensor:
    folded = (rows >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(rows)  # high bits to low places; no two words alike
    return folded.mul_(_weights(str(rows.device))[: rows.shape[1]]).sum(1)


@cache
def _weights(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(1 << 63), (1 << 63) - 1, (_ROW,), generator=generator, device="cpu") | 1).to(device)


@dataclass(frozen=True)
class Sketch:
    """A gradient's norm, and its sums with random signs, from which the distance to another gradient is estimated.

    Attributes:
        projections: the sums, one for each of `NUM_SIGNS` patterns of signs.
        norm: the gradient's norm.
        size: its number of elements.
    """

    projections: tuple[float, ...]
    norm: float
    size: int

    @classmethod
    def of(cls, gradient: Tensor) -> Sketch:
        """Of the part of a gradient that lies here."""
        part = local(gradient.detach())
        part = part.to_dense() if part.layout is not torch.strided else part
        flat = (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part).reshape(-1)
        columns = _signs(_COLUMNS, 1).to(flat.device)
        sums, square = torch.zeros(NUM_SIGNS, dtype=torch.float64, device=flat.device), 0.0
        for number, piece in enumerate(flat.split(_COLUMNS * 64)):
            values = piece.double()
            square += float(values.square().sum())
            rows = torch.nn.functional.pad(values, (0, -len(values) % _COLUMNS)).view(-1, _COLUMNS)
            turned = _signs(len(rows), 2 + number).to(flat.device)
            sums += ((rows @ columns) * turned).sum(0)
        return cls(tuple(sums.tolist()), square**0.5, flat.numel())

    def distance(self, other: Sketch | None) -> float:
        """An estimate of the norm of the difference."""
        theirs = (0.0,) * NUM_SIGNS if other is None else other.projections
        squares = [(a - b) ** 2 for a, b in zip(self.projections, theirs, strict=True)]
        return float((sum(squares) / NUM_SIGNS) ** 0.5)


NUM_SIGNS = 8
"""Patterns of signs. All of them miss a difference with a chance below 1e-6."""
_COLUMNS = 4096


def _signs(num: int, seed: int) -> Tensor:
    """Random signs, [num, NUM_SIGNS], the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (num, NUM_SIGNS), generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
