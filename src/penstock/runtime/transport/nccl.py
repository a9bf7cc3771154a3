"""Messages between devices over a backend without tags (NCCL): each channel has a line of its own.

A line is a process group of the two ranks at a channel's ends. Its messages come in the order in which they were
sent. Each message is announced through host memory, with its tag. Its receive is posted when the announcement comes:

    op ends on its device | announced by gloo ----> the receive is posted
                          | sent by NCCL =========> from device to device

So no receive ever waits on a device for an op that another rank has yet to run. This matters because a waiting NCCL
kernel occupies processors of its GPU, and CUDA may let nothing else start behind it: the first use of a kernel, or an
allocation of memory, can wait for everything that runs. When two ranks posted receives ahead, they deadlocked in
their first step.

NCCL's own wait makes a stream wait, with all computation queued on it, and lets the host continue. But a rank that
picks its ops must know which messages are there. So a thread asks whether a receive has ended, and the compute stream
never waits for a message: an op is launched when what it needs has come.

If a link fails, a kernel that waits for it stays on its GPU, and holds up computation, until the line is aborted. So
all lines of a rank are aborted at once, by a thread that waits for no GPU. An aborted receive counts as completed,
and NCCL reports no error. So from that moment on no message counts as arrived, though some may have been whole.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.collective import WeakGroup, explained
from penstock.runtime.mesh.peers import groups_of
from penstock.runtime.transport.channel import ChannelKey
from penstock.runtime.transport.wire_format import ALIGN, Packet, WireSpec
from penstock.runtime.transport.wiring import Wiring

FIRST_LOOK, LONGEST_LOOK = 20e-6, 500e-6
"""Seconds between two looks at whether a message has come, at first and at most."""
POSTING = 1.0
"""Seconds that what is being posted gets before its line is aborted: it may wait for a GPU that stands still."""
LEAVING = 2.0
"""Seconds that what is under way gets to end when a pipeline is closed."""
WITHOUT_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""What lines are made with. Else torch's watchdog would end the process where one fails, after a minute in which no
group can be destroyed."""
GIVEN_UP = "NCCL: the lines of this rank were given up, as a link had failed"


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
    for number, wired in enumerate(wiring.wired_ops):
        rank = wiring.graph.host(number)
        for _, edge, target, _ in wired.sends:
            line = NcclChannel(ChannelKey.of(edge), rank, target)
            if not edge.is_token and line.source != line.target:
                sent.setdefault(line, []).append(edge.consumer.microbatch)
        for edge in wired.received_edges:
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


QUEUES, MOST_QUEUES = 8, 32
"""Queues of work between a host and its GPU: by default, and at most (CUDA_DEVICE_MAX_CONNECTIONS)."""
OTHER_STREAMS = 5
"""Streams beside those of the lines: for computing, copies, waits for collectives, receives and reads."""


def require_queues(channels: Sequence[NcclChannel], rank: int, other_streams: int = 0) -> None:
    """Raises RuntimeFailure where a rank has more lines and other streams than queues of its GPU: the stream that
    computes could share one with a receive that waits, and stand still behind it.
    """
    queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES))
    needed = sum(rank in (line.source, line.target) for line in channels) + OTHER_STREAMS + other_streams
    if needed > queues:
        raise RuntimeFailure(
            f"transport 'nccl' would use {needed} streams on rank {rank}, and its GPU has {queues} queues of work: "
            f"an op could wait behind a message; set CUDA_DEVICE_MAX_CONNECTIONS={MOST_QUEUES} before the program "
            "starts, or use transport='host' or a schedule with fewer stages per rank"
        )


class LineStreams:
    """Two streams of a GPU on which messages move, apart from the one that computes.

    Neither ever waits for a message, so that neither holds up another.
    """

    def __init__(self, device: torch.device) -> None:
        self._receives, self._ends = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._device = device

    def receiving(self, free: Any) -> AbstractContextManager[Any]:
        """Around what makes or posts a buffer.

        Args:
            free: a mark behind the last use of the buffer, for which its receive waits; None for a new one.
        """
        if free is not None:
            self._receives.wait_event(free)
        return torch.cuda.stream(self._receives)

    def ending(self) -> AbstractContextManager[Any]:
        """Around the backend's own wait for a message that has come or left: no other work waits with it."""
        return torch.cuda.stream(self._ends)

    def used(self, buffer: torch.Tensor) -> Any:
        """A mark behind what the stream that computes was given, the use of a buffer being the last."""
        computing = torch.cuda.current_stream(self._device)
        buffer.record_stream(computing)  # once let go, its memory is not used again before
        mark = torch.cuda.Event()
        mark.record(computing)
        return mark


class DeviceLines:
    """The lines of one rank, as a part of what carries messages between processes.

    Args:
        group: of all ranks, with a backend for host memory. channels: the same on every rank.
        backend: of the lines: "nccl", or "gloo" where the device is the processor.
        timeout: seconds that their making may take.
        device: where payloads lie.
        streams: of the device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        channels: Sequence[NcclChannel],
        backend: str,
        timeout: float,
        device: torch.device,
        streams: LineStreams,
    ) -> None:
        self._rank, self._device, self._streams = dist.get_rank(group), device, streams
        self._timeout = timeout
        self._lines: dict[tuple[ChannelKey, bool], WeakGroup] = {}
        """By channel and whether this rank sends: with several pipelines it may be at either end of like ones."""
        self._posting, self._giving_up = threading.Lock(), threading.Lock()
        self._is_given_up = threading.Event()
        self._under_way: deque[NcclMessageHandle] = deque()
        before = dict(os.environ)
        os.environ.update(WITHOUT_WATCHDOG)  # torch reads this as it makes a group
        try:
            groups = groups_of({line: (line.source, line.target) for line in channels}, group, timeout, backend)
        finally:
            for name in WITHOUT_WATCHDOG:
                del os.environ[name]
            os.environ.update(before)
        for line, made in groups.items():
            if made is not None:
                self._lines[line.key, self._rank == line.source] = WeakGroup(made)
                self._connect(made, line)

    def _connect(self, group: Any, line: NcclChannel) -> None:
        """Sends a first message, at which the backend connects the two ends: it waits for both of them."""
        value = torch.zeros(1, device=self._device)
        if self._rank == line.source:
            dist.send(value, group=group, group_dst=_other_end(group))
        else:
            dist.recv(value, group=group, group_src=_other_end(group))

    def packet(self, spec: WireSpec) -> Packet:
        """A buffer for payloads in the device's memory. Its preamble lies in host memory, and travels there."""
        with self._streams.receiving(None):
            buffer = torch.empty(spec.num_bytes, dtype=torch.uint8, device=self._device)
        return Packet(spec, buffer, torch.empty(ALIGN, dtype=torch.uint8, device="cpu"))

    def used(self, packet: Packet) -> None:
        """Takes note that all that reads a packet's buffer has been given to the device."""
        packet.free = self._streams.used(packet.buffer)

    def send(self, key: ChannelKey, peer: int, packet: Packet, timeout: float) -> Any:
        """Starts to send by a channel; the error of a line that failed names the other end."""
        with explained(self._rank, peer, "a message to leave", timeout), self._at_line(key, sends=True) as line:
            return self._begun(dist.isend(packet.buffer, group=line, group_dst=_other_end(line)))

    def receive(self, key: ChannelKey, peer: int, packet: Packet, timeout: float) -> Any:
        """Starts to receive, likewise, what has been announced."""
        with (
            explained(self._rank, peer, "a message", timeout),
            self._at_line(key, sends=False) as line,
            self._streams.receiving(packet.free),
        ):
            return self._begun(dist.irecv(packet.buffer, group=line, group_src=_other_end(line)))

    @contextmanager
    def _at_line(self, key: ChannelKey, sends: bool) -> Iterator[dist.ProcessGroup]:
        """Around the posting of a message: a line that was aborted meanwhile would try to connect again."""
        with self._posting:
            if self._is_given_up.is_set():
                raise RuntimeError(GIVEN_UP)
            yield self._lines[key, sends]()

    def _begun(self, work: Any) -> Any:
        while self._under_way and self._under_way[0].has_ended:
            self._under_way.popleft()
        begun = NcclMessageHandle(work, self._streams, self._is_given_up)
        self._under_way.append(begun)
        return begun

    def give_up(self) -> None:
        """Aborts all lines: the device lets go of what is under way, none of which comes or leaves any more. Any
        thread may call it; it returns when that is done, which needs nothing of the device or of another rank.
        """
        with self._giving_up:
            if self._is_given_up.is_set():
                return
            self._is_given_up.set()
            held = self._posting.acquire(timeout=POSTING)
            try:
                # Side by side: each may take half a second.
                groups = [line() for line in self._lines.values() if line.is_alive]
                threads = [threading.Thread(target=each.abort, daemon=True) for each in groups]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(self._timeout)
            finally:
                if held:
                    self._posting.release()

    def close(self) -> None:
        """Gives up lines on which something is under way still, as when a step failed: who ends a process, or its
        groups, would wait for the device, and that for what never comes.
        """
        until = time.monotonic() + LEAVING
        try:
            for each in list(self._under_way):
                each.wait(timedelta(seconds=max(0.0, until - time.monotonic())))
        except RuntimeError:
            self.give_up()


def _other_end(line: dist.ProcessGroup) -> int:
    """The peer's rank in a line. Torch orders the two by process, and the pipeline may order them the other way."""
    return 1 - dist.get_rank(line)


class NcclMessageHandle:
    """A message under way whose end the host can wait for, where the backend's own wait stops a stream instead.

    Args:
        given_up: set before lines are aborted.

    Attributes:
        has_ended: whether it is known to have come or left.
    """

    def __init__(self, work: Any, streams: LineStreams, given_up: threading.Event) -> None:
        self._work, self._streams, self._given_up = work, streams, given_up
        self.has_ended = False

    def wait(self, limit: timedelta) -> None:
        """Returns once it has come, or has left.

        Raises:
            RuntimeError: it has not within the limit ("timed out"), or the line failed or was given up.
        """
        pause, until = FIRST_LOOK, time.monotonic() + limit.total_seconds()
        while not self._given_up.is_set() and not self._work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"timed out after {limit.total_seconds():g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK)
        if self._given_up.is_set():  # asked last: an aborted message counts as completed
            raise RuntimeError(GIVEN_UP)
        with self._streams.ending():
            self._work.wait()  # returns at once, and raises what went wrong
        self.has_ended = True
