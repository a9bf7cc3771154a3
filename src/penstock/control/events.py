"""Events for the controller: messages timed, iterations ended, links dead and alive again, switches made.

Events are values, and each is one line of JSON, so that a run's log can be replayed:

    {"transfers": {"0:1": [16777216.0, [30.0, 30.2, 61.0], 0.0, 0.0]}}     bytes, times, busy for, held
    {"ops": {"3:3": {"F": [9.98, 10.1], "I": [9.97, 10.1]}}}       of rank 3, stage 3: times of two halves
    {"iteration": {"number": 7, "ms": 412.0}}

What a rank reports about an iteration is small: `Transfers` for each direction on which it received messages, and
`OpTimes` for each stage that it ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from statistics import fmean, median
from typing import Any, NamedTuple

from penstock.control.errors import ControlError
from penstock.control.queueing import BusyTime, alone, busy_time, held_share
from penstock.formats.native import from_json, to_json
from penstock.schedule import Schedule

OP_KINDS = ("F", "B", "I", "W")
"""Kinds of ops whose times are watched."""
Link = tuple[int, int]
"""A directed pair of ranks: from, to."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """All messages of one direction of a link in one iteration: what its receiver reports. Make it by `of`.

    Feed those of an iteration before its `IterationEnded`, one of each direction. Times have three digits, in the log
    as everywhere else, so that what is replayed is what was fed.

    Attributes:
        link: from which rank to which.
        num_bytes: of each message, in the order in which they began.
        ms: how long each took by itself: waiting for its receiver, and behind others on a busy link, left out.
        busy: how long the link was busy with a message of middling size (ms): those behind it waited. 0 where they
            did not hold one another up; None where too few were under way together to tell.
        held: share of messages that arrived together with the one before, though they began later, on a link that is
            not busy: what loss looks like in a stream.

    Raises:
        ControlError: a link that is not two different ranks; no messages, or not as many sizes as times; a size or
            a time that is negative or not a number.

    Examples:
        >>> import penstock as ps
        >>> report = ps.control.Transfers.of((0, 1), [(1e6, 0.0, 1.0), (1e6, 10.0, 11.0)])
        >>> report.ms
        (1.0, 1.0)
    """

    link: Link
    num_bytes: tuple[float, ...]
    ms: tuple[float, ...]
    busy: float | None = None
    held: float = 0.0

    def __post_init__(self) -> None:
        _check_link(self.link)
        if not self.ms or len(self.num_bytes) != len(self.ms):
            raise ControlError(
                f"link {show_link(self.link)}: {len(self.num_bytes)} sizes and {len(self.ms)} times: give "
                "one size and one time per message, and no event where no message passed"
            )
        for size, ms in zip(self.num_bytes, self.ms, strict=True):
            require_amount(f"the size of a message on link {show_link(self.link)}", size)
            require_amount(f"the time of a message on link {show_link(self.link)}", ms)
        if self.busy is not None:
            require_amount(f"the busy time of link {show_link(self.link)}", self.busy)
            object.__setattr__(self, "busy", rounded(self.busy))
        if not 0 <= self.held <= 1:
            raise ControlError(f"link {show_link(self.link)}: held is {self.held!r}: give a share from 0 to 1")
        object.__setattr__(self, "held", round(self.held, 2))
        object.__setattr__(self, "num_bytes", tuple(map(float, self.num_bytes)))
        object.__setattr__(self, "ms", tuple(map(rounded, self.ms)))

    @classmethod
    def of(cls, link: Link, rows: Iterable[tuple[float, float, float]]) -> Transfers:
        """From messages as (bytes, began, ended), in ms of any one clock.

        A message began when both sides were ready: `began = max(sent, posted)`. So of a runtime's crossing it is
        `(num_bytes, max(sent, posted) / 1e6, arrived / 1e6)`.
        """
        ordered = sorted(
            ((float(size), began, max(began, ended)) for size, began, ended in rows), key=lambda row: row[1]
        )
        busy = busy_time(ordered)
        size = median([row[0] for row in ordered]) if ordered else 0.0
        times = tuple(alone(ordered, busy or BusyTime()))
        long = None if busy is None else busy.of(size)
        held = 0.0 if long or not ordered else held_share(ordered)
        return cls(link, tuple(row[0] for row in ordered), times, long, held)


@dataclass(frozen=True, slots=True)
class OpTimes:
    """How long a stage's ops took in one iteration: what the rank that ran them reports. Make it by `of`.

    Feed those of an iteration before its `IterationEnded`, one of each stage of each rank.

    Attributes:
        rank, stage: which rank ran which stage.
        ms: by kind of op, the median of the iteration's first half and of its second half (ms).

    Raises:
        ControlError: a rank or stage below 0; a time that is negative or not a number.

    Examples:
        >>> import penstock as ps
        >>> times = ps.control.OpTimes.of(0, 0, [("F", 10.0), ("F", 10.2), ("B", 20.0), ("B", 20.4)])
        >>> dict(times.ms)
        {'B': (20.0, 20.4), 'F': (10.0, 10.2)}
    """

    rank: int
    stage: int
    ms: tuple[tuple[str, tuple[float, float]], ...]

    def __post_init__(self) -> None:
        if self.rank < 0 or self.stage < 0:
            raise ControlError(f"ops of rank {self.rank}, stage {self.stage}: both count from 0")
        for kind, halves in self.ms:
            for ms in halves:
                require_amount(f"the time of {kind} of stage {self.stage}", ms)
        found = ((kind, (rounded(first), rounded(second))) for kind, (first, second) in self.ms)
        object.__setattr__(self, "ms", tuple(sorted(found)))

    @classmethod
    def of(cls, rank: int, stage: int, ops: Iterable[tuple[str, float]]) -> OpTimes:
        """From the ops that ran, in order, as (kind, ms)."""
        by_kind: dict[str, list[float]] = {}
        for kind, ms in ops:
            by_kind.setdefault(kind, []).append(ms)
        halves = {}
        for kind, times in by_kind.items():
            middle = (len(times) + 1) // 2
            halves[kind] = (median(times[:middle]), median(times[middle:] or times))
        return cls(rank, stage, tuple(halves.items()))


@dataclass(frozen=True, slots=True)
class IterationEnded:
    """All ranks have ended an iteration.

    Attributes:
        number: the number of the iteration. Numbers rise.
        ms: how long it took, in ms.

    Examples:
        >>> import penstock as ps
        >>> ps.control.IterationEnded(number=0, ms=212.5)
        IterationEnded(number=0, ms=212.5)
    """

    number: int
    ms: float

    def __post_init__(self) -> None:
        require_amount(f"the time of iteration {self.number}", self.ms)


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link's own path carries nothing any more, in either direction.

    Attributes:
        link: the link, as (from, to).

    Examples:
        >>> import penstock as ps
        >>> ps.control.LinkDown((2, 3)).link
        (2, 3)
    """

    link: Link

    def __post_init__(self) -> None:
        _check_link(self.link)


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link's own path carries messages again.

    Attributes:
        link: the link, as (from, to).

    Examples:
        >>> import penstock as ps
        >>> ps.control.LinkUp((2, 3)).link
        (2, 3)
    """

    link: Link

    def __post_init__(self) -> None:
        _check_link(self.link)


class LinkTime(NamedTuple):
    """What messages take on a link between two nodes.

    Attributes:
        ms: a short message, one way.
        ms_per_mb: what each million bytes of a long message adds; 0 where only short messages were sent.
    """

    ms: float
    ms_per_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class Probed:
    """What messages between two nodes of a mesh take while nothing else is under way. Make it by `of`.

    Attributes:
        times: of each two nodes, the lower first.

    Raises:
        ControlError: a link that is not two different nodes; a time that is negative or not a number.
    """

    times: tuple[tuple[Link, LinkTime], ...]

    def __post_init__(self) -> None:
        for link, time in self.times:
            _check_link(link)
            for each in time:
                require_amount(f"the time of a probe of nodes {show_link(link)}", each)
        times = ((link, LinkTime(*map(rounded, time))) for link, time in self.times)
        object.__setattr__(self, "times", tuple(times))

    @classmethod
    def of(cls, times: Mapping[Link, LinkTime | float]) -> Probed:
        """From the times by two nodes, in either order; a number is that of a short message."""
        found = {
            undirected(link): time if isinstance(time, LinkTime) else LinkTime(time) for link, time in times.items()
        }
        return cls(tuple(sorted(found.items())))


@dataclass(frozen=True, slots=True)
class Reranked:
    """The answer to a search for better places of the nodes, which `Controller.search` gives.

    Attributes:
        number: of the search.
        configuration: what should run, and where nodes should lie, as `Configuration.to_json` writes it.
        ms_now, ms_moved, ms_then: predicted iteration times (ms): as things are, with the nodes moved, and then with
            what should run.
        ring_ms: how much of `ms_now` links of rings cost by being late or slow.
    """

    number: int
    configuration: str
    ms_now: float
    ms_moved: float
    ms_then: float
    ring_ms: float


@dataclass(frozen=True, slots=True)
class Switched:
    """All ranks run decision `number` from the next iteration on.

    Attributes:
        number: the number of the decision.

    Examples:
        >>> import penstock as ps
        >>> ps.control.Switched(1).number
        1
    """

    number: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Decision `number` was given up: no rank runs it, and none will.

    Attributes:
        number: the number of the decision.

    Examples:
        >>> import penstock as ps
        >>> ps.control.Dropped(1).number
        1
    """

    number: int


@dataclass(frozen=True, slots=True)
class Offered:
    """A schedule found elsewhere, by `ps.plan` for example, that the controller may choose from now on.

    Attributes:
        schedule: the schedule.

    Examples:
        >>> import penstock as ps
        >>> ps.control.Offered(ps.build("zb-h1", 4, 8)).schedule.name
        'zb-h1'
    """

    schedule: Schedule


Event = Transfers | OpTimes | IterationEnded | LinkDown | LinkUp | Probed | Reranked | Switched | Dropped | Offered
_NAMES: dict[str, type[Any]] = {
    "transfers": Transfers,
    "ops": OpTimes,
    "iteration": IterationEnded,
    "down": LinkDown,
    "up": LinkUp,
    "probed": Probed,
    "reranked": Reranked,
    "switched": Switched,
    "dropped": Dropped,
    "offered": Offered,
}


def event_to_json(event: Event) -> dict[str, Any]:
    """The event as `{name: fields}`."""
    name = next(name for name, kind in _NAMES.items() if isinstance(event, kind))
    if isinstance(event, Offered):
        return {name: {"schedule": to_json(event.schedule)}}
    if isinstance(event, Transfers):
        sizes: object = list(event.num_bytes) if len(set(event.num_bytes)) > 1 else event.num_bytes[0]
        return {name: {show_link(event.link): [sizes, list(event.ms), event.busy, event.held]}}
    if isinstance(event, OpTimes):
        return {name: {f"{event.rank}:{event.stage}": {kind: list(halves) for kind, halves in event.ms}}}
    if isinstance(event, Probed):
        return {name: {show_link(link): list(time) for link, time in event.times}}
    return {name: asdict(event)}


def event_from_json(value: Mapping[str, Any]) -> Event:
    """Reads what `event_to_json` wrote.

    Raises:
        ControlError: an unknown event, or fields that are missing or wrong.
    """
    name = next(iter(value), "")
    if len(value) != 1 or name not in _NAMES or not isinstance(value[name], dict):
        raise ControlError(
            f"{str(dict(value))[:80]} is no event: one of {', '.join(_NAMES)} with its fields is needed"
        )
    fields = dict(value[name])
    if isinstance(fields.get("link"), list):
        fields["link"] = tuple(fields["link"])
    if name == "offered" and isinstance(fields.get("schedule"), str):
        fields["schedule"] = from_json(fields["schedule"])
    try:
        if name == "transfers":
            ((link, (sizes, ms, busy, held)),) = fields.items()
            each = tuple(sizes) if isinstance(sizes, list) else (sizes,) * len(ms)
            return Transfers(read_link(link), each, tuple(ms), busy, held)
        if name == "ops":
            ((link, kinds),) = fields.items()
            return OpTimes(
                *read_link(link), tuple((kind, (first, second)) for kind, (first, second) in kinds.items())
            )
        if name == "probed":
            return Probed(tuple((read_link(link), LinkTime(*time)) for link, time in fields.items()))
        return _NAMES[name](**fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ControlError):
            raise
        raise ControlError(f"event {name!r} with fields {', '.join(fields) or 'none'}: others are needed") from None


def rounded(ms: float) -> float:
    """The time of three digits next to this one."""
    return float(f"{ms:.3g}")


def undirected(link: Link) -> Link:
    """The link's two ranks, the lower one first."""
    return (link[0], link[1]) if link[0] < link[1] else (link[1], link[0])


def show_link(link: Link) -> str:
    return f"{link[0]}:{link[1]}"


def read_link(text: str) -> Link:
    """Reads `show_link`, and two numbers of anything else. Raises ValueError for other text."""
    first, second = text.split(":")
    return int(first), int(second)


def _check_link(link: object) -> None:
    if (
        not isinstance(link, tuple)
        or len(link) != 2
        or not all(isinstance(rank, int) and rank >= 0 for rank in link)
        or link[0] == link[1]
    ):
        raise ControlError(f"link {link!r}: name it by its two ranks, like (0, 1)")


def require_amount(what: str, value: object) -> None:
    """Raises ControlError unless the value is a number of at least 0."""
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ControlError(f"{what} is {value!r}: give a number of at least 0")


def slowest_of(replicas: Iterable[Sequence[Event]]) -> list[Event]:
    """Joins the events that replicas of a pipeline report of one iteration, as if there were one pipeline.

    Of each link and each stage the event of the slowest replica is kept. Every other event is kept once. Events stay
    in the order in which they first came.
    """
    found: dict[object, Event] = {}
    for events in replicas:
        for event in events:
            key: object = event
            if isinstance(event, Transfers):
                key = "link", event.link
            elif isinstance(event, OpTimes):
                key = "ops", event.rank, event.stage
            elif isinstance(event, IterationEnded):
                key = "end", event.number
            known = found.get(key)
            if known is None or _slowness(event) > _slowness(known):
                found[key] = event
    return list(found.values())


def _slowness(event: Event) -> float:
    if isinstance(event, Transfers):
        return fmean(event.ms)
    if isinstance(event, OpTimes):
        return sum(sum(halves) for _, halves in event.ms)
    return event.ms if isinstance(event, IterationEnded) else 0.0
