"""What the process of a lab is asked to make, as its command line says it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class LabOrder:
    """What a keeper is to keep.

    Attributes:
        links: as the user wrote them. owner: the process it is made for, if any; lifeline: the pipe that says so.
        ready: a descriptor on which it says that the lab is there, or what went wrong.
    """

    num_hosts: int
    num_nics: int
    links: tuple[str, ...]
    owner: int | None
    lifeline: int | None
    ready: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LabOrder:
        values = json.loads(text)
        return cls(**{**values, "links": tuple(values["links"])})
