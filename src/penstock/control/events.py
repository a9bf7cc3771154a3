"""What the controller is told: messages timed, iterations ended, links gone and back, switches made.

Events are values, and each is one line of JSON, so that a run's log replays:

    {"transfer": {"link": [0, 1], "num_bytes": 16777216.0, "ms": 30.2}}
    {"iteration": {"number": 7, "ms": 412.0}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

from penstock.control.errors import ControlError
from penstock.formats.native import from_json, to_json
from penstock.schedule import Schedule

Link = tuple[int, int]
"""A directed pair of ranks: from, to."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message passed.

    Attributes:
        link: from which rank to which.
        num_bytes: its size.
        ms: how long it took, waiting left out; see `timed`.

    Raises:
        ControlError: a link that is not two different ranks, a size or a time that is negative or not a number.
    """

    link: Link
    num_bytes: float
    ms: float

    def __post_init__(self) -> None:
        _check_link(self.link)
        _check_number(f"the size of a message on link {show_link(self.link)}", self.num_bytes)
        _check_number(f"the time of a message on link {show_link(self.link)}", self.ms)

    @classmethod
    def timed(cls, link: Link, num_bytes: float, sent: float, posted: float, ended: float) -> Transfer:
        """From times on one clock (ms): `end - max(start of both sides)`, so that waiting is not slowness.

            sender     |sent ------------------------ ended
            receiver           |posted -------------- ended
                               |<------- ms -------->|

        The rule is that of ByteDance's what-if analysis (OSDI'25). A message that ended before its receiver looked
        for it took no time that anybody can see: 0.
        """
        return cls(link, float(num_bytes), max(0.0, ended - max(sent, posted)))


@dataclass(frozen=True, slots=True)
class IterationEnded:
    """All ranks have ended iteration `number`, which took `ms`. Numbers rise."""

    number: int
    ms: float

    def __post_init__(self) -> None:
        _check_number(f"the time of iteration {self.number}", self.ms)


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link's own path carries nothing any more, in either direction."""

    link: Link

    def __post_init__(self) -> None:
        _check_link(self.link)


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link's own path carries messages again."""

    link: Link

    def __post_init__(self) -> None:
        _check_link(self.link)


@dataclass(frozen=True, slots=True)
class Switched:
    """All ranks run decision `number` from the next iteration on."""

    number: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Decision `number` was given up: no rank runs it, and none will."""

    number: int


@dataclass(frozen=True, slots=True)
class Offered:
    """A schedule found elsewhere, by `ps.plan` for one, that the controller may choose from now on."""

    schedule: Schedule


Event = Transfer | IterationEnded | LinkDown | LinkUp | Switched | Dropped | Offered
_NAMES: dict[str, type[Any]] = {
    "transfer": Transfer,
    "iteration": IterationEnded,
    "down": LinkDown,
    "up": LinkUp,
    "switched": Switched,
    "dropped": Dropped,
    "offered": Offered,
}


def event_to_json(event: Event) -> dict[str, Any]:
    """The event as `{name: fields}`."""
    name = next(name for name, kind in _NAMES.items() if isinstance(event, kind))
    if isinstance(event, Offered):
        return {name: {"schedule": to_json(event.schedule)}}
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
        return _NAMES[name](**fields)
    except TypeError:
        raise ControlError(f"event {name!r} with fields {', '.join(fields) or 'none'}: others are needed") from None


def undirected(link: Link) -> Link:
    """The link's two ranks, the lower one first."""
    return (link[0], link[1]) if link[0] < link[1] else (link[1], link[0])


def show_link(link: Link) -> str:
    return f"{link[0]}:{link[1]}"


def _check_link(link: object) -> None:
    if (
        not isinstance(link, tuple)
        or len(link) != 2
        or not all(isinstance(rank, int) and rank >= 0 for rank in link)
        or link[0] == link[1]
    ):
        raise ControlError(f"link {link!r}: name it by its two ranks, like (0, 1)")


def _check_number(what: str, value: object) -> None:
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ControlError(f"{what} is {value!r}: a number of at least 0 is needed")
