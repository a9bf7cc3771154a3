"""Channels: how the messages between two ranks are told apart and kept in order.

A channel carries one kind of message between two stages: activations, gradients or a tied gradient. Within
it messages come in the order of the consumer's queue, so that the next one is always known and can have a
buffer posted before it is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from penstock.runtime.message import Edge
from penstock.runtime.wire_format import Spec

SignatureOf = Callable[[Edge], str]
"""The signature of the microbatch an edge belongs to: equal signatures promise equal specs."""


class ChannelKey(NamedTuple):
    """Names a channel: the stages at its ends, the direction of the model, and the tied slot (0: none)."""

    producer: int
    consumer: int
    forward: bool
    slot: int

    @classmethod
    def of(cls, edge: Edge) -> ChannelKey:
        return cls(edge.producer.stage, edge.consumer.stage, edge.producer.kind == "F", edge.slot)

    def reverse(self) -> ChannelKey:
        """The channel of the answers: gradients for activations, the next activations for gradients."""
        return ChannelKey(self.consumer, self.producer, not self.forward, self.slot)


class Tags:
    """Numbers for messages, the same on every rank: each channel has one for headers, one a microbatch."""

    def __init__(self, num_stages: int, num_slots: int, num_microbatches: int) -> None:
        self._stages, self._slots, self._microbatches = num_stages, num_slots + 1, num_microbatches

    def header(self, key: ChannelKey) -> int:
        channel = (key.producer * self._stages + key.consumer) * self._slots + key.slot
        return (channel * 2 + key.forward) * (self._microbatches + 1)

    def message(self, edge: Edge) -> int:
        return self.header(ChannelKey.of(edge)) + 1 + edge.consumer.microbatch


@dataclass
class Posted:
    """A receive under way."""

    edge: Edge
    work: Any
    buffer: Tensor
    spec: Spec


@dataclass
class Incoming:
    """The receiving end of a channel.

    Attributes:
        peer: the rank that sends.
        known: signature -> spec, kept from step to step.
        waiting: this step's edges with no buffer posted yet; posted: those with one.
        headers_due: how many headers this step still brings.
        received: payloads taken in this step.
    """

    key: ChannelKey
    peer: int
    known: dict[str, Spec] = field(default_factory=dict)
    waiting: deque[Edge] = field(default_factory=deque)
    posted: deque[Posted] = field(default_factory=deque)
    headers_due: int = 0
    received: int = 0


@dataclass
class Outgoing:
    """The sending end of a channel.

    Attributes:
        peer: the rank that receives.
        known: signature -> spec that the other side has been told.
        under_way: this step's messages not known to have been taken: their sends and their buffers.
        taken: how many have been.
    """

    key: ChannelKey
    peer: int
    known: dict[str, Spec] = field(default_factory=dict)
    under_way: deque[list[tuple[Any, Tensor]]] = field(default_factory=deque)
    taken: int = 0
