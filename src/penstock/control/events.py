"""Events for the controller: messages timed, iterations ended, links dead and alive again, switches made.

Events are values, and each is one line of JSON, so that a run's log can be replayed:

    {"transfers": {"link": [0, 1], "num_bytes": [16777216.0], "ms": [30.0, 30.2, 61.0], "busy": 0.0, "held": 0.0}}
    {"ops": {"rank": 3, "stage": 3, "ms": [["F", [9.98, 10.1]], ["I", [9.97, 10.1]]]}}
    {"iteration": {"number": 7, "ms": 412.0}}

What a rank reports about an iteration is small: `Transfers` for each direction on which it received messages, and
`OpTimes` for each stage that it ran.

`Transfers.of` tells a busy link from a late one by whether messages hold one another up:


    late by 40 ms         |------ 40 ------|              each message arrives 40 ms after it began,
                              |------ 40 ------|          however many are under way

    busy for 40 ms        |======== 40 ========|                       the second waits for the first:
                              | - waits - - - -|======== 40 ========|  it takes 70 ms, of which 30 are waiting

    lost and sent again   |- - - - - - - 200 - - - - - - -|
                              |- - - held up - - - - - - -|        the second arrives with the first

A message that waits behind others takes no longer by itself, so that waiting is taken off, as that for a late
receiver is. How long the link is busy with each is tried out: the number that makes messages which found the link
free and messages which did not take the same time is the right one, if it explains much more than none does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from numbers import Real
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.formats.native import from_json, to_json
from penstock.schedule import Schedule


class ControlError(ValueError):
    """Measurements, settings or logs that make no sense; says what was given, the rule and what to do.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.control.Transfers((0, 0), (100,), (1.0,))
        ... except ps.control.ControlError as error:
        ...     print(error)
        link (0, 0): name it by its two ranks, like (0, 1)
    """


Row = tuple[float, float, float]
"""A message: bytes, when both sides were ready (ms), when it had arrived (ms)."""

FEWEST_TOGETHER = 2
"""Messages that began while another was under way from which on the question can be answered."""
TOGETHER = 0.25
"""Share of the time between two messages' beginnings up to which they count as arrived together."""
_CLEARLY = 0.02
"""Share of a message's time by which another must have begun before its end, to count as begun during it."""
BETTER = 0.5
"""Share of the unexplained differences that may be left where a link counts as busy."""


def busy_times(rows: Sequence[Row]) -> list[float] | None:
    """How long the link is busy with each message (ms): as long with each, or by its bytes. All are 0 where messages
    do not hold one another up.

    None where that cannot be told: too few began while another was under way.

    Args:
        rows: of one direction in one iteration, in the order in which they began.
    """
    gaps = [(number, after[2] - before[2]) for number, (before, after) in enumerate(pairwise(rows), start=1)]
    during = [
        (number, gap)
        for number, gap in gaps
        if rows[number][1] < rows[number - 1][2] - _CLEARLY * (rows[number - 1][2] - rows[number - 1][1])
    ]
    if len(during) < FEWEST_TOGETHER:
        return None
    sizes = [size for size, _, _ in rows]
    shapes = [[1.0] * len(rows), sizes] if len(set(sizes)) > 1 else [[1.0] * len(rows)]

    def unlike(busy: Sequence[float]) -> float:
        return _unlike(rows, waits(rows, busy))

    def scaled(rate: float, shape: Sequence[float]) -> list[float]:
        return [rate * each for each in shape]

    free = [0.0] * len(rows)
    tried = [(rate, shape) for shape in shapes for rate in _quarters(_rates(during, shape))]
    rate, shape = min(tried, key=lambda each: unlike(scaled(*each)), default=(0.0, free))
    # The same, told by those messages alone that really waited.
    waiting = waits(rows, scaled(rate, shape))
    waited = _rates([(number, gap) for number, gap in gaps if waiting[number] > 0], shape)
    found = min((scaled(each, shape) for each in (rate, median(waited or [rate]))), key=unlike)
    plain, left = unlike(free), unlike(found)
    least = 0.02 * median(ended - began for _, began, ended in rows)
    return free if left > BETTER * plain or min(plain - left, median(found)) < least else found


def _rates(gaps: Sequence[tuple[int, float]], shape: Sequence[float]) -> list[float]:
    """By how much messages, each with its number, arrive after the one before (ms): for each unit of a shape."""
    return [gap / shape[number] for number, gap in gaps if shape[number] > 0]


def held_share(rows: Sequence[Row]) -> float:
    """The share of messages that arrive together with the one before, though they began later.

    A stream hands on nothing out of order, so what waits for a packet that was lost arrives at one moment.
    """
    held = 0
    for before, after in pairwise(rows):
        apart = after[1] - before[1]
        during = before[2] - after[1] > _CLEARLY * (before[2] - before[1])
        held += during and after[2] - before[2] < TOGETHER * apart
    return held / len(rows)


def waits(rows: Sequence[Row], busy: Sequence[float]) -> list[float]:
    """How long each message waits behind those before it (ms), if the link is `busy` so long with each."""
    found, free = [], float("-inf")
    for (_, began, _), ms in zip(rows, busy, strict=True):
        begins = max(began, free)
        found.append(begins - began)
        free = begins + ms
    return found


def alone(rows: Sequence[Row], waiting: Sequence[float]) -> list[float]:
    """What each message takes by itself (ms), without waiting behind others."""
    return [max(0.0, ended - began - wait) for (_, began, ended), wait in zip(rows, waiting, strict=True)]


def _unlike(rows: Sequence[Row], waiting: Sequence[float]) -> float:
    """How far, waiting taken off, messages differ from others of their size (ms).

    Those that found the link free are few once it is full, and count as much as all others together.
    """
    times = [ended - began - wait for (_, began, ended), wait in zip(rows, waiting, strict=True)]
    by_size: dict[float, list[float]] = {}
    for (size, _, _), time in zip(rows, times, strict=True):
        by_size.setdefault(size, []).append(time)
    middle = {size: median(each) for size, each in by_size.items()}
    differ: dict[bool, list[float]] = {}
    last = float("-inf")
    for (size, began, ended), time in zip(rows, times, strict=True):
        differ.setdefault(began >= last, []).append(abs(time - middle[size]))
        last = ended
    return sum(map(fmean, differ.values())) / 2


def _quarters(values: Sequence[float]) -> list[float]:
    """The first, second and third quarter's ends of what is above 0."""
    above = sorted(value for value in values if value > 0)
    return [above[len(above) * part // 4] for part in (1, 2, 3)] if above else []


T = TypeVar("T")
OP_KINDS = ("F", "B", "I", "W")
"""Kinds of ops whose times are watched."""
Link = tuple[int, int]
"""A directed pair of ranks: from, to."""


@dataclass(frozen=True)
class _Event:
    """Something that happened. Its links are two different ranks, and its numbers are finite and at least 0."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "link":
                require_link(value)
            for number in _numbers(value):
                require_amount(f"{each.name} of {type(self).__name__}", number)


def _numbers(value: object) -> Iterator[object]:
    """The numbers in a value, however deep in tuples."""
    if isinstance(value, tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, Real):
        yield value


@dataclass(frozen=True)
class Transfers(_Event):
    """All messages of one direction of a link in one iteration: what its receiver reports. Make it by `of`.

    Feed those of an iteration before its `IterationEnded`, one of each direction. Times have three digits, in the log
    as everywhere else, so that what is replayed is what was fed.

    Attributes:
        link: from which rank to which.
        num_bytes: of each message, in the order in which they began; a single number where all are alike.
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
        super().__post_init__()
        if not self.ms or len(self.num_bytes) not in (1, len(self.ms)):
            raise ControlError(
                f"link {show_link(self.link)}: {len(self.num_bytes)} sizes and {len(self.ms)} times: give "
                "one size and one time per message, and no event where no message passed"
            )
        if self.held > 1:
            raise ControlError(f"link {show_link(self.link)}: held is {self.held!r}: give a share from 0 to 1")
        sizes = self.num_bytes if len(set(self.num_bytes)) > 1 else self.num_bytes[:1]
        _set(self, num_bytes=tuple(map(float, sizes)), ms=tuple(map(rounded, self.ms)), held=round(self.held, 2))
        _set(self, busy=None if self.busy is None else rounded(self.busy))

    @property
    def messages(self) -> list[tuple[float, float]]:
        """Each message's bytes and time (ms)."""
        sizes = self.num_bytes if len(self.num_bytes) > 1 else self.num_bytes * len(self.ms)
        return list(zip(sizes, self.ms, strict=True))

    @classmethod
    def of(cls, link: Link, rows: Iterable[tuple[float, float, float]]) -> Transfers:
        """From messages as (bytes, began, ended), in ms of any one clock.

        A message began when both sides were ready: `began = max(sent, posted)`. So of a runtime's crossing it is
        `(num_bytes, max(sent, posted) / 1e6, arrived / 1e6)`.
        """
        ordered = sorted(
            ((float(size), began, max(began, ended)) for size, began, ended in rows), key=lambda row: row[1]
        )
        busy = busy_times(ordered)
        times = alone(ordered, waits(ordered, busy or [0.0] * len(ordered)))
        long = median(busy) if busy else None
        held = 0.0 if long or not ordered else held_share(ordered)
        return cls(link, tuple(row[0] for row in ordered), tuple(times), long, held)


@dataclass(frozen=True)
class OpTimes(_Event):
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
        super().__post_init__()
        _set(self, ms=tuple(sorted((kind, tuple(map(rounded, halves))) for kind, halves in self.ms)))

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


@dataclass(frozen=True)
class IterationEnded(_Event):
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


@dataclass(frozen=True)
class LinkDown(_Event):
    """The link's own path carries nothing any more, in either direction.

    Attributes:
        link: the link, as (from, to).

    Examples:
        >>> import penstock as ps
        >>> ps.control.LinkDown((2, 3)).link
        (2, 3)
    """

    link: Link


@dataclass(frozen=True)
class LinkUp(_Event):
    """The link's own path carries messages again.

    Attributes:
        link: the link, as (from, to).

    Examples:
        >>> import penstock as ps
        >>> ps.control.LinkUp((2, 3)).link
        (2, 3)
    """

    link: Link


class LinkTime(NamedTuple):
    """What messages take on a link between two nodes.

    Attributes:
        ms: a short message, one way.
        ms_per_mb: what each million bytes of a long message adds; 0 where only short messages were sent.
    """

    ms: float
    ms_per_mb: float = 0.0


@dataclass(frozen=True)
class Probed(_Event):
    """What messages between two nodes of a mesh take while nothing else is under way. Make it by `of`.

    Attributes:
        times: of each two nodes, the lower first.

    Raises:
        ControlError: a link that is not two different nodes; a time that is negative or not a number.
    """

    times: tuple[tuple[Link, LinkTime], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for link, _ in self.times:
            require_link(link)
        _set(self, times=tuple((link, LinkTime(*map(rounded, time))) for link, time in self.times))

    @classmethod
    def of(cls, times: Mapping[Link, LinkTime | float]) -> Probed:
        """From the times by two nodes, in either order; a number is that of a short message."""
        found = {
            undirected(link): time if isinstance(time, LinkTime) else LinkTime(time) for link, time in times.items()
        }
        return cls(tuple(sorted(found.items())))


@dataclass(frozen=True)
class Reranked(_Event):
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


@dataclass(frozen=True)
class Switched(_Event):
    """All ranks run decision `number` from the next iteration on.

    Attributes:
        number: the number of the decision.

    Examples:
        >>> import penstock as ps
        >>> ps.control.Switched(1).number
        1
    """

    number: int


@dataclass(frozen=True)
class Dropped(_Event):
    """Decision `number` was given up: no rank runs it, and none will.

    Attributes:
        number: the number of the decision.

    Examples:
        >>> import penstock as ps
        >>> ps.control.Dropped(1).number
        1
    """

    number: int


@dataclass(frozen=True)
class Offered(_Event):
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
    return {name: {"schedule": to_json(event.schedule)} if isinstance(event, Offered) else msgspec.to_builtins(event)}


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
    if name == "offered":
        return Offered(from_json(as_type(value[name].get("schedule"), str)))
    found: Event = as_type(value[name], _NAMES[name])
    return found


def as_type(value: object, kind: type[T]) -> T:
    """What a line of a log says, as a value of a type. Raises ControlError for anything else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ControlError(f"no {kind.__name__} that this version wrote: {str(value)[:80]}: {error}") from None


def _set(event: _Event, **values: object) -> None:
    """Gives fields of a new event their final form."""
    for name, value in values.items():
        object.__setattr__(event, name, value)


def rounded(ms: float) -> float:
    """The time of three digits next to this one."""
    return float(f"{ms:.3g}")


def undirected(link: Link) -> Link:
    """The link's two ranks, the lower one first."""
    return (link[0], link[1]) if link[0] < link[1] else (link[1], link[0])


def show_link(link: Link) -> str:
    return f"{link[0]}:{link[1]}"


def require_link(link: object) -> None:
    """Raises ControlError unless the value is two different ranks."""
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
    found: dict[object, tuple[float, Event]] = {}
    for event in chain.from_iterable(replicas):
        key, ms = _measured(event)
        if key not in found or ms > found[key][0]:
            found[key] = ms, event
    return [event for _, event in found.values()]


def _measured(event: Event) -> tuple[object, float]:
    """What an event measures, and how long that took (ms)."""
    if isinstance(event, Transfers):
        return ("link", event.link), fmean(event.ms)
    if isinstance(event, OpTimes):
        return ("ops", event.rank, event.stage), sum(sum(halves) for _, halves in event.ms)
    if isinstance(event, IterationEnded):
        return ("end", event.number), event.ms
    return event, 0.0
