"""The format of a payload on the wire: one flat buffer of bytes, and a spec (as JSON) that says how to read it.

    | preamble, 64 bytes | tensor, padded to 64 | tensor, padded to 64 | ...

Whoever sends says what a message looks like: its spec lies before it where both ends map one memory, and goes before
it over gloo if the receiver can't know it (see `gloo`). The preamble identifies the message, so that a
mix-up is an error and never a wrong number. It also says how many of the other side's messages have come in, so that
the other side can release its copies, and when the message was handed over.

Tensors keep their memory layout: a matmul may round differently on a transposed or sliced operand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Payload
from penstock.runtime.tensors.pytree import DTYPES, Skeleton

ALIGN = 64
_PREAMBLE = Struct("5q")
"""Of the fields of `Preamble`, in their order."""
Shape = tuple[int, ...]
LeafSpec = tuple[Shape, Shape, torch.dtype, bool] | None


@dataclass(frozen=True)
class WireSpec:
    """Shapes, types and arrangement of a payload.

    Attributes:
        leaves: (shape, strides, type, whether its gradient is wanted) of each tensor; None for an absent gradient.
        skeleton: see `tree.flatten`, as JSON.
    """

    leaves: tuple[LeafSpec, ...]
    skeleton: str

    @classmethod
    def of(cls, payload: Payload) -> WireSpec:
        return cls(tuple(map(_leaf_spec, payload.leaves, payload.needs_grad)), _as_json(payload.skeleton))

    def fits(self, payload: Payload) -> bool:
        """Whether this is the payload's spec."""
        leaves, skeleton = payload.leaves, payload.skeleton
        if len(leaves) != len(self.leaves):
            return False
        if self.skeleton != ("0" if type(skeleton) is int and not skeleton else _as_json(skeleton)):
            return False
        if len(leaves) == 1:  # most payloads
            return _fits(leaves[0], self.leaves[0], payload.needs_grad[0])
        return all(map(_fits, leaves, self.leaves, payload.needs_grad))

    @cached_property
    def places(self) -> tuple[BufferPlace | None, ...]:
        """Where each leaf lies."""
        places: list[BufferPlace | None] = []
        start = ALIGN
        for leaf in self.leaves:
            place = None if leaf is None else BufferPlace.of(start, *leaf[:3])
            places.append(place)
            start += 0 if place is None else _padded(place.num_bytes)
        return tuple(places)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return ALIGN + sum(_padded(place.num_bytes) for place in self.places if place is not None)

    @cached_property
    def carried_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(place.num_bytes for place in self.places if place is not None)

    @cached_property
    def needs_grad(self) -> list[bool]:
        return [leaf is not None and leaf[3] for leaf in self.leaves]

    def to_bytes(self) -> bytes:
        """The spec as the receiver of a message gets it."""
        leaves = [
            None if leaf is None else [*leaf[:2], str(leaf[2]).removeprefix("torch."), leaf[3]]
            for leaf in self.leaves
        ]
        return json.dumps([leaves, self.skeleton]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WireSpec:
        """Reads `to_bytes`."""
        leaves, skeleton = json.loads(data)
        specs = tuple(
            None if leaf is None else (tuple(leaf[0]), tuple(leaf[1]), DTYPES[leaf[2]], bool(leaf[3]))
            for leaf in leaves
        )
        return cls(specs, skeleton)


class SpecCache:
    """The specs of messages, each made once by its sender, and read once by a receiver."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Hashable, str], tuple[WireSpec, bytes]] = {}
        self._read: dict[bytes, WireSpec] = {}

    def of(self, payload: Payload, channel: Hashable, signature: str) -> tuple[WireSpec, bytes]:
        """A payload's spec and its bytes, most likely those of the last payload of this channel and signature."""
        known = self._sent.get((channel, signature))
        if known is None or not known[0].fits(payload):
            spec = WireSpec.of(payload)
            known = self._sent[channel, signature] = spec, spec.to_bytes()
        return known

    def read(self, data: bytes) -> WireSpec:
        """The spec that these bytes tell."""
        spec = self._read.get(data)
        if spec is None:
            spec = self._read[data] = WireSpec.from_bytes(data)
        return spec


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def _as_json(skeleton: Skeleton) -> str:
    return str(skeleton) if type(skeleton) is int else json.dumps(skeleton)


def _fits(leaf: Tensor | None, spec: LeafSpec, needed: bool) -> bool:
    """Whether this is a leaf's spec."""
    if leaf is None or spec is None:
        return leaf is spec
    shape, strides, dtype, wanted = spec
    return leaf.dtype is dtype and needed == wanted and leaf.stride() == strides and leaf.shape == shape


def _leaf_spec(leaf: Tensor | None, needed: bool) -> LeafSpec:
    if leaf is None:
        return None
    if leaf.layout is not torch.strided:
        raise RuntimeFailure(f"a tensor of layout {leaf.layout} can't pass between ranks; use to_dense()")
    if type(leaf) not in (Tensor, Parameter):
        raise RuntimeFailure(
            f"a {type(leaf).__name__}, a class of tensors, can't pass between ranks, which would make a plain one of "
            "it; use as_subclass(torch.Tensor)"
        )
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, needed


@dataclass(frozen=True)
class BufferPlace:
    """Where a leaf lies in the buffer.

    Attributes:
        shape, strides: how its bytes are read; what the leaf repeats (by a stride of 0) is there once.
        rebuilt: the strides of a leaf that has gaps in memory, which don't travel; else None.
        repeated: the leaf's own shape where it repeats something; else None.
    """

    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: Shape
    strides: Shape
    rebuilt: Shape | None
    repeated: Shape | None

    @classmethod
    def of(cls, start: int, shape: Shape, strides: Shape, dtype: torch.dtype) -> BufferPlace:
        once = tuple(1 if stride == 0 else extent for extent, stride in zip(shape, strides, strict=True))
        num = math.prod(once)
        size = num * dtype.itemsize
        repeated = shape if once != shape else None
        if num == 0 or _is_dense(once, strides):
            return cls(start, size, dtype, once, strides, None, repeated)
        plain = tuple(torch.empty(once, device="meta").stride())
        return cls(start, size, dtype, once, plain, strides, repeated)

    @property
    def is_plain(self) -> bool:
        """Whether the bytes in the buffer are the leaf as it was."""
        return self.rebuilt is None and self.repeated is None

    def view(self, buffer: Tensor) -> Tensor:
        """The leaf's bytes in the buffer."""
        flat = buffer.narrow(0, self.start, self.num_bytes).view(self.dtype)
        return flat.as_strided(self.shape, self.strides)

    def once(self, leaf: Tensor) -> Tensor:
        """What of the leaf travels."""
        return leaf if self.repeated is None else leaf.as_strided(self.shape, leaf.stride())

    def leaf(self, view: Tensor) -> Tensor:
        """The leaf as it was, a copy of its bytes."""
        if self.rebuilt is None:
            leaf = view.clone()
        else:
            leaf = torch.empty_strided(self.shape, self.rebuilt, dtype=self.dtype, device=view.device).copy_(view)
        return leaf if self.repeated is None else leaf.expand(self.repeated)


def _is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order of dimensions."""
    expected = 1
    for stride, extent in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= extent
    return True


class Packet:
    """A flat buffer for payloads of one spec, and views of its parts.

    Args:
        buffer: memory to use; its own where not given. head: where the preamble lies, if not there.

    Attributes:
        free: a mark of a device behind the last use of the buffer, for which whatever fills it again must wait; None
            where there is nothing to wait for.
    """

    free: Any = None

    def __init__(self, spec: WireSpec, buffer: Tensor | None = None, head: Tensor | None = None) -> None:
        self.spec = spec
        self.buffer = torch.empty(spec.num_bytes, dtype=torch.uint8, device="cpu") if buffer is None else buffer
        self._head_apart = head
        self._head = (self.buffer if head is None else head).numpy().data.cast("B")[:ALIGN]
        self._views = [None if place is None else place.view(self.buffer) for place in spec.places]

    @cached_property
    def head(self) -> Tensor:
        """The preamble's bytes."""
        return self.buffer[:ALIGN] if self._head_apart is None else self._head_apart

    @cached_property
    def _only(self) -> Tensor | None:
        """The view of a payload's tensor, where that is one alone whose bytes lie here as they are."""
        place = self.spec.places[0] if len(self.spec.places) == 1 and self.spec.skeleton == "0" else None
        return self._views[0] if place is not None and place.is_plain else None

    def pack(self, payload: Payload) -> None:
        """Copies a payload of the packet's spec in."""
        if self._only is not None and payload.leaves[0] is not None:
            self._only.copy_(payload.leaves[0])
            return
        for view, place, leaf in zip(self._views, self.spec.places, payload.leaves, strict=True):
            if leaf is not None and view is not None and place is not None:
                view.copy_(place.once(leaf))

    def announce(self, preamble: Preamble) -> None:
        """Writes the preamble alone."""
        _PREAMBLE.pack_into(self._head, 0, *preamble)

    def preamble(self) -> Preamble:
        return Preamble(*_PREAMBLE.unpack_from(self._head))

    def unpack(self, copy: Callable[[Tensor, BufferPlace], Tensor] | None = None) -> Payload:
        """The payload, copied out: the packet is free again. `copy` copies each leaf from its view, if given."""
        spec = self.spec
        if self._only is not None and copy is None:
            return Payload([self._only.clone()], 0, spec.needs_grad)
        copy = copy or (lambda view, place: place.leaf(view))
        leaves = [
            None if view is None or place is None else copy(view, place)
            for view, place in zip(self._views, spec.places, strict=True)
        ]
        return Payload(leaves, 0 if spec.skeleton == "0" else json.loads(spec.skeleton), spec.needs_grad)


class Preamble(NamedTuple):
    """The first bytes of a payload.

    Attributes:
        tag, step: which message it is.
        received: how many of the other side's have come in.
        sent: when it was handed over, in nanoseconds of the sender's monotonic clock.
        spec_bytes: how many bytes of a spec follow, where this is no message but says what messages look like.
    """

    tag: int
    step: int
    received: int
    sent: int
    spec_bytes: int = 0
