"""How a payload looks on the wire: one flat buffer of bytes, and a header that says how to read it.

    payload  | preamble, 64 bytes | tensor, padded to 64 | tensor, padded to 64 | ...
    header   | length, 8 bytes    | JSON of the spec, padded to HEADER_BYTES    |

A header travels only when the receiver can't know the spec: the first time a channel carries a microbatch
of some shape. After that the payload alone is sent, into a buffer posted ahead. The preamble repeats
which message it is, so that a mix-up is an error and never a wrong number, and tells the other side how
many of its messages have come in, so that it can let go of its copies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.message import Payload
from penstock.runtime.tree import DTYPES

ALIGN = 64
HEADER_BYTES = 2048
LeafSpec = tuple[tuple[int, ...], torch.dtype, bool] | None


@dataclass(frozen=True)
class Spec:
    """Shapes, types and arrangement of a payload.

    Attributes:
        leaves: (shape, type, whether its gradient is wanted) of each tensor; None for an absent gradient.
        skeleton: see `tree.flatten`, as JSON.
    """

    leaves: tuple[LeafSpec, ...]
    skeleton: str

    @classmethod
    def of(cls, payload: Payload) -> Spec:
        leaves = tuple(
            None if leaf is None else (tuple(leaf.shape), leaf.dtype, needed)
            for leaf, needed in zip(payload.leaves, payload.needs_grad, strict=True)
        )
        skeleton = payload.skeleton
        return cls(leaves, "0" if isinstance(skeleton, int) else json.dumps(skeleton))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each leaf starts, and at the end the size of the whole."""
        places = [ALIGN]
        for leaf in self.leaves:
            size = 0
            if leaf is not None:
                shape, dtype, _ = leaf
                size = dtype.itemsize
                for extent in shape:
                    size *= extent
            places.append(places[-1] + -(-size // ALIGN) * ALIGN)
        return tuple(places)

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]

    def to_json(self) -> str:
        leaves = [
            None if leaf is None else [leaf[0], str(leaf[1]).removeprefix("torch."), leaf[2]] for leaf in self.leaves
        ]
        return json.dumps([leaves, self.skeleton])

    @classmethod
    def from_json(cls, text: str) -> Spec:
        leaves, skeleton = json.loads(text)
        specs = tuple(None if leaf is None else (tuple(leaf[0]), DTYPES[leaf[1]], bool(leaf[2])) for leaf in leaves)
        return cls(specs, skeleton)


@dataclass(frozen=True)
class Preamble:
    """The first bytes of a payload: which message it is."""

    tag: int
    step: int
    received: int
    changed: bool = False

    def write(self, buffer: Tensor) -> None:
        buffer[:ALIGN].view(torch.int64)[:4] = torch.tensor([self.tag, self.step, self.received, self.changed])

    @classmethod
    def read(cls, buffer: Tensor) -> Preamble:
        tag, step, received, changed = buffer[:ALIGN].view(torch.int64)[:4].tolist()
        return cls(tag, step, received, bool(changed))


def pack(payload: Payload, spec: Spec, preamble: Preamble, buffer: Tensor) -> None:
    """Copies a payload into a buffer of `spec.num_bytes` bytes."""
    preamble.write(buffer)
    for place, leaf_spec, leaf in zip(spec.offsets, spec.leaves, payload.leaves, strict=False):
        if leaf is not None and leaf_spec is not None and leaf.numel():
            _view(buffer, place, leaf_spec).copy_(leaf)


def unpack(buffer: Tensor, spec: Spec) -> Payload:
    """The payload whose tensors are views of `buffer`."""
    leaves = [
        None if leaf is None else _view(buffer, place, leaf)
        for place, leaf in zip(spec.offsets, spec.leaves, strict=False)
    ]
    needs = [leaf is not None and leaf[2] for leaf in spec.leaves]
    return Payload(leaves, json.loads(spec.skeleton), needs)


def _view(buffer: Tensor, place: int, leaf: tuple[tuple[int, ...], torch.dtype, bool]) -> Tensor:
    shape, dtype, _ = leaf
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return buffer[place : place + size].view(dtype).view(shape)


def pack_header(key: Any, spec: Spec) -> list[Tensor]:
    """The header of a spec that goes by `key`: one fixed-size part, and the rest where it does not fit."""
    text = json.dumps([key, spec.to_json()]).encode()
    first = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    first[:8].view(torch.int64)[0] = len(text)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    room = HEADER_BYTES - 8
    first[8 : 8 + min(room, len(text))] = data[:room]
    return [first, data[room:].clone()] if len(text) > room else [first]


def header_rest(first: Tensor) -> int:
    """How many bytes of a header follow its first part."""
    return max(0, int(first[:8].view(torch.int64)[0]) - (HEADER_BYTES - 8))


def unpack_header(first: Tensor, rest: Tensor | None) -> tuple[Any, Spec]:
    """The key and the spec of a header."""
    length = int(first[:8].view(torch.int64)[0])
    data = bytes(first[8:].tolist()) + (b"" if rest is None else bytes(rest.tolist()))
    try:
        key, spec = json.loads(data[:length])
        return key, Spec.from_json(spec)
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeFailure(f"a message header can't be read ({error}); the ranks run different versions") from None
