"""Which transport carries messages: its name as users give it, what it holds, and how it is made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from penstock.control import Event
from penstock.cost import Links
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import addresses_for, network_name
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.transport.acknowledgements import Acknowledgements
from penstock.runtime.transport.base import Transport, layers_of
from penstock.runtime.transport.bounded import DEPTH, BoundedTransport, require_depth
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.conditioned import ConditionedTransport, Conditions, clocks_ahead
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.runtime.transport.delegate.transport import HOST_MEMORY
from penstock.runtime.transport.failover import Failover
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.loopback import LoopbackTransport, Mailbox
from penstock.runtime.transport.nccl import CudaLineStreams, DeviceLines, lines_of, require_queues
from penstock.runtime.transport.routed import RoutedTransport
from penstock.runtime.transport.shared_memory import open_shared_memory
from penstock.runtime.transport.wiring import Wiring
from penstock.schedule import Schedule
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Blocking

NAMES = ("host", "gloo", "direct", "delegate", "nccl")
BASES = ("host", "gloo", "direct")
"""Transports of which single links may be delegated."""


@dataclass(frozen=True)
class DelegateOptions:
    """How delegates carry messages.

    Attributes:
        num: delegates for each direction and kind of a link, to begin with.
        most: the largest number that measured rates may lead to.
        interfaces: this host's addresses or interfaces' names, the preferred one first; when one dies messages go by
            the next. None: those in PENSTOCK_INTERFACES, else in GLOO_SOCKET_IFNAME, else loopback where all ranks
            are on one host, else that which reaches MASTER_ADDR.
        host_memory: bytes that messages may take in a rank's host memory on their way out, and as many coming in.

    Examples:
        >>> import penstock as ps
        >>> ps.TransportOptions("delegate", delegates=ps.runtime.DelegateOptions(num=2))
        TransportOptions(name='delegate', delegates=DelegateOptions(num=2))
    """

    num: int = 1
    most: int = 4
    interfaces: tuple[str, ...] | None = None
    host_memory: int = HOST_MEMORY

    __repr__ = short_repr


@dataclass(frozen=True)
class TransportOptions:
    """What carries messages between processes, and how.

    Attributes:
        name: "host" (shared memory between ranks of one host, else gloo; messages of a GPU pass through host memory,
            so several ranks may share one GPU), "gloo", "direct" (gloo with a bound on messages under way),
            "delegate" (processes of their own carry messages), or "nccl" (from GPU to GPU, one GPU per rank).
        delegates: how delegates carry messages. With "host" or "direct" it says that single links may be delegated.
        depth: for experiments: how many messages may be under way to another rank before the sender waits. "direct"
            has a depth of 2 where none is given, the others have no bound.
        links: for experiments: delays and conditions of links, by their two ranks. Messages arrive when these say,
            and the numbers stay the same. Over a mesh with replicas they join nodes.

    Raises:
        RuntimeFailure: an unknown name, a depth below 1, or a value of another type.

    Examples:
        >>> import penstock as ps
        >>> ps.TransportOptions("direct", links=ps.Links({(0, 1): 20.0})).name
        'direct'

    References:
        PipeMorph (NSDI 2026), section 5.2: delegates.
    """

    name: str = "host"
    delegates: DelegateOptions | None = None
    depth: int | None = None
    links: Links | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        TransportChoice(self.name, self.depth)
        if self.delegates is not None and not isinstance(self.delegates, DelegateOptions):
            raise RuntimeFailure(f"delegates is {self.delegates!r}; give ps.runtime.DelegateOptions(...)")
        if self.links is not None and not isinstance(self.links, Links):
            raise RuntimeFailure(f"links is {self.links!r}; give ps.Links(...)")

    @classmethod
    def of(cls, given: TransportOptions | str | None) -> TransportOptions:
        """Options as they are; a name alone stands for options with that name."""
        if given is None or isinstance(given, TransportOptions):
            return given or cls()
        return cls(given)

    def choice(self, may_delegate: bool) -> TransportChoice:
        """What it comes to, where links may be delegated (by adapting) or the user says how."""
        has_delegates = (self.delegates is not None or may_delegate) and self.name in BASES
        return TransportChoice(self.name, self.depth, has_delegates, self.delegates or DelegateOptions())


@dataclass(frozen=True)
class TransportChoice:
    """How messages travel.

    Attributes:
        name: "host" (through host memory, sends never wait: memory that processes share where all are on one host,
            else gloo), "gloo" (the same, always by gloo), "direct" (in order, a bounded channel a link), "delegate"
            (every link by delegate processes) or "nccl" (from GPU to GPU).
        depth: messages under way to another rank before their sender stands still; None: any number.
        has_delegates: whether single links may go by delegates while it runs.
        delegates: how these carry messages.

    Raises:
        RuntimeFailure: another name, or a depth that cannot be.
    """

    name: str = "host"
    depth: int | None = None
    has_delegates: bool = False
    delegates: DelegateOptions = field(default_factory=DelegateOptions)

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise RuntimeFailure(f"transport {self.name!r}: give {', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r}")
        if self.name == "direct" and self.depth is None:
            object.__setattr__(self, "depth", DEPTH)
        if self.depth is not None and (not isinstance(self.depth, int) or self.depth < 1):
            raise RuntimeFailure(f"a channel of depth {self.depth} carries nothing; give at least 1")

    @property
    def shared(self) -> str:
        """What all ranks must have alike, in words."""
        routed = f" with {self.delegates.num} to {self.delegates.most} delegates" if self.has_delegates else ""
        return f"{self.name}{'' if self.depth is None else f' of depth {self.depth}'}{routed}"

    def route(self, transport: Transport | None, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links go by delegates, and so have no bound."""
        for layer in layers_of(transport):
            if isinstance(layer, RoutedTransport | BoundedTransport):
                layer.route(frozenset(delegated))

    def prepare(self, transport: Transport | None, delegated: Collection[tuple[int, int]]) -> None:
        """Starts the delegates of links that are to be delegated, before they are needed; any thread may do that."""
        for layer in layers_of(transport):
            if isinstance(layer, RoutedTransport) and delegated:
                layer.prepare(delegated)

    def counters(self, transport: Transport | None) -> dict[str, int] | None:
        """What this rank's delegates have counted so far, where there are any."""
        for layer in layers_of(transport):
            if isinstance(layer, RoutedTransport | DelegateTransport):
                return asdict(layer.counters)
        return None

    def link_events(self, transport: Transport | None) -> list[Event]:
        """Links whose own interfaces died or came back since the last call, as far as delegates know."""
        for layer in layers_of(transport):
            if isinstance(layer, RoutedTransport | DelegateTransport):
                return list(layer.link_events())
        return []

    def notices(self, transport: Transport | None) -> list[str]:
        """What a person should know of the interfaces that messages go by."""
        return [
            notice
            for layer in layers_of(transport)
            if isinstance(layer, DelegateTransport)
            for notice in layer.notices
        ]

    def require_schedule(self, schedule: Schedule, delegated: Collection[tuple[int, int]] = ()) -> None:
        """Raises RuntimeFailure where a schedule could come to a standstill in channels of this depth, or where links
        are to be delegated and nothing is there for it.
        """
        if delegated and not self.has_delegates:
            raise RuntimeFailure(
                f"links {sorted(delegated)} are to be delegated, and transport {self.name!r} was made without "
                "delegates: give ps.TransportOptions(delegates=ps.runtime.DelegateOptions())"
            )
        if self.depth is not None:
            require_depth(schedule, self.depth)

    def simulated(self, delegated: Collection[tuple[int, int]] = ()) -> Blocking | str:
        """What the simulator calls it, with these links delegated."""
        return "decoupled" if self.depth is None else Blocking(self.depth, frozenset(delegated))

    def between_threads(self, boxes: Sequence[Mailbox], conditions: Conditions, timeout: float) -> list[Transport]:
        """The ends of ranks that are threads, by rank: messages are handed over, with the bound that this has."""
        made: list[Transport] = []
        for rank in range(len(boxes)):
            end = ConditionedTransport(LoopbackTransport(boxes, rank, timeout), conditions)
            made.append(end if self.depth is None else BoundedTransport(end, self.depth))
        return made

    def make(
        self,
        peers: GroupPeers,
        tags: Tags,
        timeout: float,
        wiring: Wiring,
        device: torch.device,
        conditions: Conditions | None,
        failover: Failover | None = None,
    ) -> Transport:
        """One rank's end, with link conditions where they are given. Every rank must call it.

        Args:
            failover: where there is another interface: messages then go on by delegates when connections break.

        Raises:
            RuntimeFailure: "nccl" without a GPU, or with more lines than a GPU has queues for; a schedule that needs
                more than `depth`; an interface that is not there; a half-duplex link.
        """
        if conditions is not None:
            conditions.require_own_queues()
        if self.depth is not None:
            require_depth(wiring.schedule, self.depth)
        made = self._carrying(peers, tags, timeout, wiring, device, failover)
        if conditions is not None:
            made = ConditionedTransport(made, conditions, clocks_ahead(peers))
        return made if self.depth is None else BoundedTransport(made, self.depth)

    def _carrying(
        self,
        peers: GroupPeers,
        tags: Tags,
        timeout: float,
        wiring: Wiring,
        device: torch.device,
        failover: Failover | None,
    ) -> Transport:
        """What carries messages from process to process."""
        if self.name == "delegate":
            return self._delegate(peers, tags, timeout, device)
        if self.name == "host" and not self.has_delegates:
            made = open_shared_memory(peers.here[0], peers.num_ranks, peers.gather, tags, timeout)
            if made is not None:
                return made
        lines = _lines(peers.group, timeout, wiring, device) if self.name == "nccl" else None
        if failover is not None:
            told = self._acknowledgements(peers, timeout, failover)
            kept = GlooTransport(failover.group(peers), tags, timeout, told, lines, keeps=True)
            delegates = self._delegate(peers, tags, timeout, device, takes_over=True)
            if lines is not None:
                failover.guard_lines(lines.give_up, lines.may_use)
            return RoutedTransport(kept, delegates, guard=failover)
        told = self._acknowledgements(peers, timeout, None)
        base = GlooTransport(peers.group, tags, timeout, told, lines)
        if not self.has_delegates:
            return base
        return RoutedTransport(base, self._delegate(peers, tags, timeout, device))

    def _acknowledgements(
        self, peers: GroupPeers, timeout: float, failover: Failover | None
    ) -> Acknowledgements | None:
        """What tells senders which messages have arrived, where their number has a bound."""
        if self.depth is None:
            return None
        if failover is None:
            return Acknowledgements(peers.group, timeout, self.depth)
        apart = failover.group_apart(peers, "acknowledgements")
        return None if apart is None else Acknowledgements(peers.group, timeout, self.depth, apart)

    def _delegate(
        self, peers: GroupPeers, tags: Tags, timeout: float, device: torch.device, takes_over: bool = False
    ) -> DelegateTransport:
        options = self.delegates
        return DelegateTransport(
            peers.here[0],
            peers.num_ranks,
            peers.gather,
            tags,
            timeout,
            interfaces=addresses_for(peers.gather(network_name()), options.interfaces),
            num_lanes=options.num,
            most_lanes=max(options.num, options.most),
            host_memory=options.host_memory,
            device=device,
            takes_over=takes_over,
        )


def _lines(group: dist.ProcessGroup, timeout: float, wiring: Wiring, device: torch.device) -> DeviceLines:
    if device.type != "cuda" or not dist.is_nccl_available():
        raise RuntimeFailure(f"transport 'nccl' needs stages on a GPU, they are on {device}; use transport='host'")
    channels = lines_of(wiring)
    for rank in range(dist.get_world_size(group)):  # all of them, so that all are told
        require_queues(channels, rank)
    return DeviceLines(group, channels, "nccl", timeout, device, CudaLineStreams(device))
