"""Links as a user writes them: `0:1=latency:30ms`, `0:1@1=loss:1%`, in the language of `cost.conditions`.

    0:1=latency:30ms      hosts 0 and 1, both directions, every network
    0:1@1=loss:1%         on network 1 alone; it overrides what holds for every network
    0:1=10 1:0=40         each direction by itself

A lab sees packets and not messages, and its TCP is real. So a message's occupancy has no meaning here, and TCP
decides how long sending again takes.

Events change a lab while a command runs on it:

    5s down 0:1                     after 5 s host 0's interface 1 goes down
    8s up 0:1                       and comes up again
    10s link 0:1 latency:60ms       a link gets another condition; `down` and `up` cut and join it
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cost import CostError, LinkCondition, Links
from penstock.cost.conditions import TIME, Trace, read_quantity
from penstock.lab.layout import LabMisuse, Layout, NetworkWay

if TYPE_CHECKING:
    from penstock.lab.lab import Lab

_LINK = re.compile(r"(?P<pair>[0-9]{1,9}:[0-9]{1,9})(?:@(?P<nic>[0-9]{1,9}))?=(?P<rest>.+)", re.DOTALL)
_EVENT_FORM = "write it like '5s down HOST:NETWORK', '8s up HOST:NETWORK' or '10s link HOST:HOST latency:60ms'"
_PLACE = re.compile(r"(?P<a>[0-9]{1,9}):(?P<b>[0-9]{1,9})(?:@(?P<nic>[0-9]{1,9}))?")


class WayChange(NamedTuple):
    """A change of a way: whether it is cut or joined again (None: neither), and what it does to packets.

    Attributes:
        keep: the condition stays as it is.
    """

    condition: LinkCondition | None = None
    cut: bool | None = False
    keep: bool = False


def read_change(text: str) -> WayChange:
    """Reads `down`, `up`, or a condition. A condition also joins a way that was cut. Raises CostError."""
    if text in ("down", "up"):
        return WayChange(cut=text == "down", keep=True)
    condition = LinkCondition.parse(text)
    check_condition(condition, text)
    return WayChange(condition)


def read_place(text: str) -> tuple[int, int, int | None]:
    """Reads `0:1` or `0:1@1`: two hosts, and a network or None for all."""
    match = _PLACE.fullmatch(text)
    if match is None:
        raise LabMisuse(f"link {text!r}: write HOST:HOST, or HOST:HOST@NETWORK, like 0:1@1")
    return int(match["a"]), int(match["b"]), None if match["nic"] is None else int(match["nic"])


def read_interface(text: str) -> tuple[int, int]:
    """Reads `0:1`, host 0's interface 1."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        raise LabMisuse(f"interface {text!r}: write HOST:NETWORK, like 0:1 for host 0's eth1")
    return int(match[1]), int(match[2])


def read_links(texts: Iterable[str], layout: Layout) -> dict[NetworkWay, LinkCondition]:
    """The condition of each way from the start. Ways without a condition are left out.

    Raises:
        CostError, LabMisuse: the text, and the rule that it breaks.
    """
    by_network: dict[int | None, list[str]] = {}
    for text in texts:
        match = _LINK.fullmatch(text)
        if match is None:
            raise LabMisuse(f"link {text!r}: write HOST:HOST=CONDITION or HOST:HOST@NETWORK=CONDITION, like 0:1=20")
        nic = None if match["nic"] is None else int(match["nic"])
        layout.check(0, nic or 0)
        by_network.setdefault(nic, []).append(f"{match['pair']}={match['rest']}")
    found: dict[NetworkWay, LinkCondition] = {}
    for nic, of_network in sorted(by_network.items(), key=lambda item: -1 if item[0] is None else item[0]):
        conditions = Links.parse(of_network)
        for (a, b), condition in conditions.conditions.items():
            layout.check(a)
            layout.check(b)
            check_condition(condition, f"{a}:{b}={condition}")
        for way in layout.ways():
            held = conditions.named(way.source, way.target)[1]
            if held is not None and nic in (None, way.nic):
                found[way] = held
    return found


def ways_of(layout: Layout, source: int, target: int, nic: int | None, both: bool) -> list[NetworkWay]:
    """The ways that a link's name means. Raises LabMisuse."""
    layout.check(source, nic or 0)
    layout.check(target)
    if source == target:
        raise LabMisuse(f"link {source}:{target} joins a host to itself; name two hosts")
    pairs = [(source, target), (target, source)] if both else [(source, target)]
    return [NetworkWay(a, b, n) for n in (layout.nics if nic is None else [nic]) for a, b in pairs]


def check_condition(condition: LinkCondition, text: str) -> None:
    """Raises CostError for a condition that applies to messages and not to packets."""
    if condition.occupancy != LinkCondition().occupancy:
        raise CostError(f"{text}: a lab sees packets, and occupancy is of messages; give a bandwidth instead")
    if condition.half_duplex:
        raise CostError(f"{text}: in a lab each direction has a queue of its own; leave half-duplex out")
    if condition.loss is not None and condition.loss.retry is not None:
        raise CostError(f"{text}: in a lab TCP itself sends again, in its own time; give the share alone, loss:1%")


def from_anywhere(condition: LinkCondition) -> LinkCondition:
    """The same condition with full paths of its trace files, for a process in another folder."""
    traces: dict[str, Any] = {
        field.name: replace(value, path=os.path.abspath(value.path))
        for field in fields(condition)
        if isinstance(value := getattr(condition, field.name), Trace) and value.path
    }
    return replace(condition, **traces)


@dataclass(frozen=True)
class LabEvent:
    """After `at` seconds, `word` (down, up or link) happens to `place`. A link gets `condition`."""

    at: float
    word: str
    place: str
    condition: str = ""

    def apply(self, lab: Lab) -> None:
        if self.word == "link":
            source, target, nic = read_place(self.place)
            lab.link(source, target, self.condition, nic=nic)
        elif self.word == "down":
            lab.interface_down(*read_interface(self.place))
        else:
            lab.interface_up(*read_interface(self.place))

    def __str__(self) -> str:
        return " ".join([f"{self.at:g}s", self.word, self.place, self.condition]).strip()


def read_events(texts: Iterable[str], layout: Layout) -> list[LabEvent]:
    """Events in the order of their times. Raises LabMisuse, CostError for events that are impossible on such a
    lab.
    """
    return sorted((_read_event(text, layout) for text in texts), key=lambda event: event.at)


def _read_event(text: str, layout: Layout) -> LabEvent:
    words = text.split()
    if len(words) < 2 or len(words) != {"down": 3, "up": 3, "link": 4}.get(words[1]):
        raise LabMisuse(f"event {text!r}: {_EVENT_FORM}")
    try:
        event = LabEvent(read_quantity(words[0], TIME) * 1e-3, *words[1:])
        if event.word == "link":
            source, target, nic = read_place(event.place)
            ways_of(layout, source, target, nic, both=True)
            read_change(event.condition)
        else:
            layout.check(*read_interface(event.place))
    except CostError as error:
        raise LabMisuse(f"event {text!r}: {error}") from None
    return event
