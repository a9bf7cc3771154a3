"""Payloads laid out in a slot of shared memory: the bytes of the spec, then the flat buffer of the wire format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.channel import ChannelKey
from penstock.runtime.transport.wire_format import BufferPlace, Packet, WireSpec


class SlotPacket(Packet):
    """A packet whose buffer lies in memory that others share."""

    def parts(self, payload: Payload) -> Iterator[tuple[Tensor, BufferPlace, Tensor]]:
        """Each leaf of a payload, with where it lies and a view of that."""
        for view, place, leaf in zip(self._views, self.spec.places, payload.leaves, strict=True):
            if leaf is not None and view is not None and place is not None:
                yield view, place, leaf

    def leaves_in_place(self) -> Payload:
        """The payload, where it lies: its leaves keep the memory. Each counts its changes by itself."""
        return self.unpack_with(lambda view, place: _in_place(view, place).data)

    def unpack_with(self, copy: Callable[[Tensor, BufferPlace], Tensor]) -> Payload:
        """The payload, each of its leaves copied out by `copy` from its view."""
        spec = self.spec
        leaves = [
            None if view is None or place is None else copy(view, place)
            for view, place in zip(self._views, spec.places, strict=True)
        ]
        return Payload(leaves, json.loads(spec.skeleton), spec.needs_grad)


class Specs:
    """Specs and their bytes, made once for each that is met."""

    def __init__(self) -> None:
        self._sent: dict[tuple[ChannelKey, str], tuple[WireSpec, bytes]] = {}
        self._read: dict[bytes, WireSpec] = {}

    def of(self, payload: Payload, key: ChannelKey, signature: str) -> tuple[WireSpec, bytes]:
        """The spec of a payload, most likely that of the last one of its channel and signature."""
        known = self._sent.get((key, signature))
        if known is None or not known[0].fits(payload):
            spec = WireSpec.of(payload)
            known = self._sent[key, signature] = spec, spec.to_json().encode()
        return known

    def read(self, data: bytes, payload_bytes: int) -> WireSpec:
        """The spec that these bytes tell, of a payload of so many bytes.

        Raises:
            RuntimeFailure: they tell none, or one of another size.
        """
        spec = self._read.get(data)
        if spec is None:
            try:
                spec = WireSpec.from_json(data.decode())
            except (ValueError, KeyError, TypeError) as error:
                raise RuntimeFailure(
                    f"the shapes of a message can't be read ({error}); the ranks run different versions"
                ) from None
            self._read[data] = spec
        if spec.num_bytes != payload_bytes:
            raise RuntimeFailure(
                f"a message of {payload_bytes} bytes whose shapes say {spec.num_bytes}; the ranks run different "
                "versions"
            )
        return spec


def _in_place(view: Tensor, place: BufferPlace) -> Tensor:
    if place.rebuilt is not None:
        return place.leaf(view)
    return view if place.repeated is None else view.expand(place.repeated)
