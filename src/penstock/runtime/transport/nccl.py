"""Messages between devices over a backend that has no tags (NCCL): a line of its own for every channel.

A line is a process group of the two ranks at a channel's ends; what it carries comes in the order in which it
was sent. Headers and tokens still go through host memory with tags, payloads from device to device.

    rank 0 ==F==> rank 1 ==F==> rank 2          a line a channel, so that a receive posted ahead
    rank 0 <==B== rank 1 <==B== rank 2          in one never holds up another
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.failure import explain
from penstock.runtime.mesh.weak_group import WeakGroup
from penstock.runtime.transport.channel import ChannelKey, Incoming, Outgoing
from penstock.runtime.transport.wire_format import DevicePacket, Packet, WireSpec
from penstock.runtime.transport.wiring import Wiring


class NcclChannel(NamedTuple):
    """A channel and the ranks at its ends."""

    key: ChannelKey
    source: int
    target: int


def lines_of(wiring: Wiring) -> list[NcclChannel]:
    """The lines that a schedule needs, in an order that is the same on every rank.

    Raises:
        RuntimeFailure: two stages take their microbatches in different orders, which a line can't carry.
    """
    sent: dict[NcclChannel, list[int]] = {}
    taken: dict[NcclChannel, list[int]] = {}
    for number, station in enumerate(wiring.stations):
        rank = wiring.graph.host(number)
        for edge, target in station.outgoing:
            line = NcclChannel(ChannelKey.of(edge), rank, target)
            if not edge.is_token and line.source != line.target:
                sent.setdefault(line, []).append(edge.consumer.microbatch)
        for edge in station.remote:
            line = NcclChannel(ChannelKey.of(edge), wiring.sender(edge, rank), rank)
            if not edge.is_token:
                taken.setdefault(line, []).append(edge.consumer.microbatch)
    for line, microbatches in sent.items():
        if microbatches != taken[line]:
            raise RuntimeFailure(
                f"stage {line.key.producer} sends microbatches in another order than stage {line.key.consumer} takes "
                f"them, which nccl can't carry; use transport='host'"
            )
    return sorted(sent)


class DeviceLines:
    """The lines of one rank, as a part of what carries messages between processes.

    Args:
        group: of all ranks, with a backend for host memory. channels: the same on every rank.
        backend: of the lines: "nccl", or "gloo" where the device is the processor.
        timeout: seconds that their making may take.
        device: where payloads lie.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        channels: Sequence[NcclChannel],
        backend: str,
        timeout: float,
        device: torch.device,
    ) -> None:
        self._rank, self._device = dist.get_rank(group), device
        self._lines: dict[tuple[ChannelKey, bool], WeakGroup] = {}
        """By channel and whether this rank sends: with several pipelines it may be at either end of like ones."""
        members = dist.get_process_group_ranks(group)
        for line in channels:
            ends = sorted((members[line.source], members[line.target]))
            made = dist.new_group(ends, timeout=timedelta(seconds=timeout), backend=backend)
            if self._rank in (line.source, line.target) and made is not None:
                self._lines[line.key, self._rank == line.source] = WeakGroup(made)
                # Both ends meet here: a line that was first used by a receive posted ahead would wait for its sender.
                dist.all_reduce(torch.zeros(1, device=device), group=made)

    def packet(self, spec: WireSpec) -> Packet:
        """A buffer for payloads."""
        return DevicePacket(spec, self._device)

    def send(self, channel: Outgoing, packet: Packet, timeout: float) -> Any:
        """Starts to send; the error of a line that failed names the other end."""
        line, end = self._lines[channel.key, True](), self._end(channel.peer)
        try:
            return dist.isend(packet.buffer, group=line, group_dst=end)
        except RuntimeError as error:
            raise explain(error, self._rank, channel.peer, "a message to leave", timeout) from None

    def receive(self, channel: Incoming, packet: Packet, timeout: float) -> Any:
        """Starts to receive, likewise."""
        line, end = self._lines[channel.key, False](), self._end(channel.peer)
        try:
            return dist.irecv(packet.buffer, group=line, group_src=end)
        except RuntimeError as error:
            raise explain(error, self._rank, channel.peer, "a message", timeout) from None

    def _end(self, peer: int) -> int:
        """The peer's rank in a line: its ends are in ascending order."""
        return int(peer > self._rank)
