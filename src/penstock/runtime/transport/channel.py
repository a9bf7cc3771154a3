"""Channels: how the messages between two ranks are told apart and kept in order.

A channel carries one kind of message between two stages: activations, gradients, a tied gradient, or the tokens of
one need. Its messages come in the order of the consumer's queue. So the next message is always known, and a buffer
can be posted for it before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.wiring import first_of_tied_values, num_indices, twins_of
from penstock.schedule import Schedule
from penstock.schedule.op import FORWARD, PREDICT, UPDATE

TAG_LIMIT = 2**31 - 1


class ChannelKey(NamedTuple):
    """Names a channel at one of its ends: the stages, the direction of the model, and the slot (see `Edge`).

    A rank hosts a stage in one pipeline at most, so that the stages say the pipeline.
    """

    producer: int
    consumer: int
    forward: bool
    slot: int

    @classmethod
    def of(cls, edge: Edge) -> ChannelKey:
        return cls(
            edge.producer.stage, edge.consumer.stage, edge.producer.kind in (FORWARD, UPDATE, PREDICT), edge.slot
        )

    def reverse(self) -> ChannelKey:
        """The channel of the answers: gradients for activations, the next activations for gradients; parameters for
        the gradients of an update."""
        return ChannelKey(self.consumer, self.producer, not self.forward, self.slot)


class Tags:
    """Numbers for messages, the same on every rank: each channel has one for specs, one per microbatch.

    The tokens of a need are a channel as well: it has one for specs, and one for each of the `num_before` tokens that
    each of its ops waits for.

    What is left of gloo's range holds a digest of the batch's shapes. Messages about different shapes then
    never meet (gloo ends the process where a message does not fit), and a deadline tells.
    """

    def __init__(self, schedule: Schedule, tied_stages: Sequence[Sequence[int]] = ()) -> None:
        """`tied_stages[k]` are the stages that share tied parameter k."""
        graph, windows, num = schedule.graph, schedule.windows, schedule.num_microbatches
        num_slots = len(tied_stages)
        if windows is not None:
            num_slots = first_of_tied_values(num_slots, windows.num_pipelines) + 2 * len(twins_of(tied_stages)) - 1
        self._stages, self._needs = schedule.num_stages, graph.needs
        self._counts = [graph.microbatches_of(stage, num) for stage in range(self._stages)]
        self._microbatches = max(num, *graph.num_microbatches, 0 if windows is None else windows.num_ops)
        edges = graph.edges or [(stage, stage + 1) for stage in range(self._stages - 1)]
        self._number = {edge: place for place, edge in enumerate(edges)}
        self._slots = 2 * len(edges)
        sizes = (1 + num_indices(schedule) * need.num_before for need in graph.needs)
        messages = (self._slots + num_slots * self._stages) * (self._microbatches + 1)
        self._first_tokens = list(accumulate(sizes, initial=messages))
        self._span = max(1, self._first_tokens[-1])  # one stage sends nothing
        self._variants = max(1, TAG_LIMIT // self._span)

    def shift(self, digest: int) -> int:
        """What to add to the tags of a step whose shapes have this digest."""
        return digest % self._variants * self._span

    def of_specs(self, key: ChannelKey) -> int:
        """The number of the messages by which a channel's sender says what the others look like."""
        if key.slot < 0:
            return self._first_tokens[-key.slot - 1]
        if key.slot:  # tied stages send to one stage in each slot, as copies do: the producer says it all
            return (self._slots + (key.slot - 1) * self._stages + key.producer) * (self._microbatches + 1)
        edge = (key.producer, key.consumer) if key.forward else (key.consumer, key.producer)
        return (2 * self._number[edge] + int(key.forward)) * (self._microbatches + 1)

    def message(self, edge: Edge) -> int:
        """The number of the message that an edge carries."""
        first = self.of_specs(ChannelKey.of(edge)) + 1
        (_, producer, m), (_, consumer, n) = edge.producer, edge.consumer
        if edge.is_token:
            num_before = self._needs[-edge.slot - 1].num_before
            return first + n * num_before + m % num_before
        # Where several of the producer's make one of the consumer's, theirs tell them apart.
        several = edge.slot == 0 and self._counts[producer] > self._counts[consumer]
        return first + (m if several or edge.is_tied_value else n)


class ExpectedMessages(NamedTuple):
    """What a channel brings a rank in one step, in order, with tags."""

    key: ChannelKey
    peer: int
    messages: tuple[tuple[Edge, int], ...]


def expected_by_channel(edges: Iterable[tuple[Edge, int]], tags: Tags) -> list[ExpectedMessages]:
    """Sorts (edge, its sender's rank), given in the order in which a rank needs them, by channel."""
    found: dict[tuple[ChannelKey, int], list[tuple[Edge, int]]] = {}
    for edge, peer in edges:
        found.setdefault((ChannelKey.of(edge), peer), []).append((edge, tags.message(edge)))
    return [ExpectedMessages(key, peer, tuple(messages)) for (key, peer), messages in found.items()]


def why_unexpected(rank: int, step: int, peer: int, of_step: int, tag: int) -> str:
    """The error of a rank, at a step, to which another one sends a message of a step that it does not expect."""
    return (
        f"rank {rank} is at step {step} and got message {tag} of step {of_step} from rank {peer}, which it does not "
        "wait for; every rank must run the same steps and schedules, on inputs and targets of the same shapes"
    )
