"""Chooses the transport that carries messages: its name, its options, and how it is made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock.control import Event
from penstock.cost import Links
from penstock.runtime.errors import RuntimeFailure, is_count, require_value
from penstock.runtime.mesh.interfaces import addresses_for, clock_name, network_name
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.probe import ahead_of_first
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.runtime.transport.delegate.payload_copies import COPY_STREAMS
from penstock.runtime.transport.delegate.transport import HOST_MEMORY, NUM_LANES
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions
from penstock.runtime.transport.nccl import DeviceLines, LineStreams, lines_of, require_queues
from penstock.runtime.transport.repeat import Attempts, GuardedGroup, GuardedTransport
from penstock.runtime.transport.routed import RoutedTransport
from penstock.runtime.transport.shared_memory import SharedMemoryTransport, open_shared_memory
from penstock.runtime.transport.wiring import Wiring
from penstock.schedule.messages import GLOO, NCCL_EDGE
from penstock.schedule.short_repr import short_repr
from penstock.unknown_names import refuse_unknown

NAMES = ("host", "gloo", "direct", "delegate", "nccl")
DELEGATES = "delegate"
"""The transport by which all links are delegated. With each of the others, single links may be."""
DEPTH = 2
"""Messages to another rank that "direct" lets be under way, where `links` are given and no `depth`."""


@refuse_unknown(RuntimeFailure)
@dataclass(frozen=True)
class DelegateOptions:
    """How delegates carry messages. A delegate is a process beside a rank that sends and receives for it.

    Attributes:
        num: how many TCP connections, in each direction of a link, share the chunks of its messages.
        interfaces: this host's addresses or names of interfaces, the preferred one first. If one dies, messages use
            the next. None: those in PENSTOCK_INTERFACES, else in GLOO_SOCKET_IFNAME, else loopback if all ranks are
            on one host, else the interface that reaches MASTER_ADDR.
        host_memory: bytes that outgoing messages may take in a rank's host memory; a larger one goes alone. Incoming
            ones may take twice as much, and up to 8 times as much while the rank waits for one without room. On a GPU
            they may take as much, and up to twice as much. A message may be as large as incoming ones may take.

    Raises:
        RuntimeFailure: a value of another type, or a number below 1.

    Examples:
        >>> import penstock as ps
        >>> ps.TransportOptions("delegate", delegates=ps.runtime.DelegateOptions(num=4))
        TransportOptions(name='delegate', delegates=DelegateOptions(num=4))
    """

    num: int = NUM_LANES
    interfaces: tuple[str, ...] | None = None
    host_memory: int = HOST_MEMORY

    __repr__ = short_repr

    def __post_init__(self) -> None:
        require_value(is_count(self.num), "num", self.num, "a whole number, at least 1")
        listed = isinstance(self.interfaces, Sequence) and not isinstance(self.interfaces, str)
        fits = self.interfaces is None or (listed and all(isinstance(each, str) for each in self.interfaces or ()))
        require_value(fits, "interfaces", self.interfaces, 'a tuple of addresses or names: ("eth0",), or None')
        require_value(is_count(self.host_memory), "host_memory", self.host_memory, "a number of bytes, at least 1")


@refuse_unknown(RuntimeFailure)
@dataclass(frozen=True)
class TransportOptions:
    """Which transport carries messages between processes, and how.

    Attributes:
        name: the transport. "host": shared memory if all ranks are on one host, else gloo; messages of a GPU pass
            through host memory, so several ranks may share one GPU. "gloo": always gloo. "direct": gloo, with a bound
            on messages under way where `links` are given. "delegate": separate processes carry the messages. "nccl":
            from GPU to GPU, with one GPU per rank.
        delegates: how delegates carry messages. With any other transport it allows single links to be delegated
            between two steps, as `adapt=` does by itself. A delegate is started when a link of its rank is delegated
            for the first time.
        depth: for experiments with `links`: how many messages to another rank these may hold under way before the
            sender waits. Default: 2 for "direct", no bound for the others. Without `links` there is no bound, because
            gloo does not say when a message has arrived.
        links: for experiments: delays and conditions of links, by their two ranks. They decide when messages arrive.
            The numbers that are computed stay the same. Over a mesh with replicas, links join nodes.

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
        if self.name not in NAMES:
            raise RuntimeFailure(f"transport {self.name!r}: give {', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r}")
        fits = self.depth is None or is_count(self.depth)
        require_value(fits, "depth", self.depth, "a whole number of messages, at least 1, or None")
        fits = self.delegates is None or isinstance(self.delegates, DelegateOptions)
        require_value(fits, "delegates", self.delegates, "ps.runtime.DelegateOptions(...), or None")
        fits = self.links is None or isinstance(self.links, Links)
        require_value(fits, "links", self.links, "ps.Links(...), or None")

    @classmethod
    def of(cls, given: TransportOptions | str | None) -> TransportOptions:
        """The options themselves, or for a name alone the options with that name."""
        if given is None or isinstance(given, TransportOptions):
            return given or cls()
        return cls(given)


class TransportChoice:
    """The transport that options choose, and how it is made.

    Args:
        may_delegate: links may be delegated by what adapting decides, too, and not only where options say so.

    Attributes:
        name: see `TransportOptions`.
        depth: how many messages to another rank link conditions hold before their sender waits. None: any number.
        has_delegates: whether single links may be delegated during the run. delegates: how they carry messages.
        simulated: the simulator's name of what carries messages of links that are not delegated. Whether gloo carries
            them is known once a transport is made.
        ahead: nanoseconds that this process's clock is ahead of each rank's, once a transport is made.
    """

    def __init__(self, options: TransportOptions, may_delegate: bool = False) -> None:
        self.name = options.name
        depth = DEPTH if options.name == "direct" and options.depth is None else options.depth
        self.depth = None if options.links is None else depth
        self.simulated = NCCL_EDGE if options.name == "nccl" else "decoupled"
        if self.depth is not None:
            self.simulated = f"blocking:{self.depth}"
        self.has_delegates = (options.delegates is not None or may_delegate) and options.name != DELEGATES
        self.delegates = options.delegates or DelegateOptions()
        self.ahead: list[int] = []

    @property
    def shared(self) -> str:
        """What must be the same on all ranks, in words."""
        routed = f" with delegates of {self.delegates.num} lanes" if self.has_delegates else ""
        return f"{self.name}{'' if self.depth is None else f' of depth {self.depth}'}{routed}"

    def route(self, transport: Transport, delegated: Collection[tuple[int, int]]) -> None:
        """Sets, between two steps, which links use delegates, and so have no bound."""
        for part in _parts(transport):
            if isinstance(part, ConditionedTransport | RoutedTransport):
                part.route(delegated)

    def is_stale(self, transport: Transport | None) -> bool:
        """Whether an attempt goes by another group than a transport."""
        return any(isinstance(part, GuardedTransport) and part.is_stale for part in _parts(transport))

    def prepare(self, transport: Transport | None, delegated: Collection[tuple[int, int]]) -> None:
        """Starts delegates of links that will be delegated, before they are needed. Any thread may call it."""
        delegates = _delegates_of(transport)
        if delegates is not None and delegated:
            delegates.prepare(delegated)

    def seen(self, transport: Transport | None) -> tuple[list[Event], dict[str, int] | None]:
        """What this rank's delegates know: links whose interfaces died or came back since the last call, and all that
        they have counted. Nothing and None where there are no delegates.
        """
        delegates = _delegates_of(transport)
        return ([], None) if delegates is None else ([*delegates.link_events()], asdict(delegates.counters))

    def notices(self, transport: Transport | None) -> list[str]:
        """Messages for the user about the interfaces that messages use."""
        delegates = _delegates_of(transport)
        return [] if delegates is None else [*delegates.notices]

    def memory_of(self, transport: Transport | None) -> SharedMemoryTransport | None:
        """The shared memory of the ranks, which can also sum; None if their messages go another way."""
        base = transport.base if isinstance(transport, RoutedTransport) else transport
        return base if isinstance(base, SharedMemoryTransport) else None

    def require_lines(self, wiring: Wiring) -> None:
        """Raises RuntimeFailure if lines between GPUs can't carry what ops send."""
        if self.name == "nccl":
            lines_of(wiring)

    def require_delegates(self, delegated: Collection[tuple[int, int]]) -> None:
        """Raises RuntimeFailure if links are to be delegated and there are no delegates."""
        if delegated and not self.has_delegates:
            raise RuntimeFailure(
                f"links {sorted(delegated)} are to be delegated, and transport {self.name!r} was made without "
                "delegates: give ps.TransportOptions(delegates=ps.runtime.DelegateOptions())"
            )

    def make(
        self,
        peers: GroupPeers,
        tags: Tags,
        timeout: float,
        wiring: Wiring,
        device: torch.device,
        conditions: Conditions | None,
        attempts: Attempts | None = None,
    ) -> Transport:
        """One rank's end, with link conditions if they are given. Every rank must call it.

        Args:
            attempts: given if there is another interface. A step is then repeated if connections break in it.

        Raises:
            RuntimeFailure: "nccl" without a GPU, or with more channels than a GPU has queues for; an interface that
                does not exist; a half-duplex link.
        """
        if conditions is not None:
            conditions.require_own_queues()
        offsets = ahead_of_first(peers, peers.gather(clock_name()))
        self.ahead[:] = [offsets[peers.here[0]] - each for each in offsets]
        base: GlooTransport | SharedMemoryTransport | None = None
        if self.name == "host":
            base = open_shared_memory(peers.here[0], peers.num_ranks, peers.gather, tags, timeout)
        if base is None and self.name != DELEGATES:
            lines = None
            if self.name == "nccl" and (attempts is None or not attempts.failover.number):
                lines = _lines(peers.group, timeout, wiring, device, COPY_STREAMS * self.has_delegates)
                if attempts is not None:
                    attempts.failover.guard_lines(lines.give_up)
            group = peers.guard.group if isinstance(peers.guard, GuardedGroup) else peers.group
            base = GlooTransport(group, tags, timeout, lines, attempts is not None, self.ahead)
            # Injected conditions say when a message arrives; over gloo, news of receives does not count for them.
            self.simulated = GLOO if lines is None and conditions is None else self.simulated
        made: Transport | None = base
        if base is None or self.has_delegates:
            options, names = self.delegates, peers.gather(network_name())
            delegates = DelegateTransport(
                peers.here[0],
                peers.gather,
                tags,
                timeout,
                addresses_for(names, options.interfaces),
                options.num,
                options.host_memory,
                device,
                starts=base is None,
            )
            made = delegates if base is None else RoutedTransport(base, delegates)
        assert made is not None
        if attempts is not None:
            made = GuardedTransport(made, attempts, not isinstance(base, SharedMemoryTransport | None))
        if conditions is not None:
            in_turn = self.simulated == NCCL_EDGE
            made = ConditionedTransport(made, conditions, self.ahead, self.depth, in_turn=in_turn)
        return made


def _parts(transport: Any) -> Iterator[Any]:
    """A transport, and those that stand behind it, one after the other; delegates come last."""
    while transport is not None:
        yield transport
        transport = getattr(transport, "inner", None)


def _delegates_of(transport: Transport | None) -> DelegateTransport | None:
    """The delegates of a rank, those of single links among them."""
    return next((part for part in _parts(transport) if isinstance(part, DelegateTransport)), None)


def _lines(group: dist.ProcessGroup, timeout: float, wiring: Wiring, device: torch.device, extra: int) -> DeviceLines:
    if device.type != "cuda" or not dist.is_nccl_available():
        raise RuntimeFailure(f"transport 'nccl' needs stages on a GPU, they are on {device}; use transport='host'")
    channels = lines_of(wiring)
    for rank in range(dist.get_world_size(group)):  # all of them, so that all are told
        require_queues(channels, rank, extra)
    return DeviceLines(group, channels, "nccl", timeout, device, LineStreams(device))
