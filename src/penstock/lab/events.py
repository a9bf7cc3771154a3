"""Events of a lab while a command runs on it, given beforehand, such as `5s down 0:1`.

5s down 0:1                     after 5 s host 0's interface 1 goes down
8s up 0:1                       and comes up again
10s link 0:1 latency:60ms       a link, as in `penstock lab link`; `down` and `up` cut and join it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.cost import CostError
from penstock.cost.conditions import TIME, read_quantity
from penstock.lab.errors import LabMisuse
from penstock.lab.layout import Layout
from penstock.lab.links import read_change, read_interface, read_place, ways_of
from penstock.lab.running import RunningLab

_FORM = "write it like '5s down HOST:NETWORK', '8s up HOST:NETWORK' or '10s link HOST:HOST latency:60ms'"


@dataclass(frozen=True)
class LabEvent:
    """After `at` seconds, `word` (down, up or link) happens to `place`. A link gets `condition`."""

    at: float
    word: str
    place: str
    condition: str = ""

    def apply(self, lab: RunningLab) -> None:
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
    return sorted((_read(text, layout) for text in texts), key=lambda event: event.at)


def _read(text: str, layout: Layout) -> LabEvent:
    words = text.split()
    if len(words) < 2 or len(words) != {"down": 3, "up": 3, "link": 4}.get(words[1]):
        raise LabMisuse(f"event {text!r}: {_FORM}")
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
