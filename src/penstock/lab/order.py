"""The lab that a keeper is asked to make, as its command line gives it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class LabOrder:
    """The lab that a keeper is to make and keep.

    Attributes:
        links: as the user wrote them. owner: the process for which the lab is made, if any; lifeline: the pipe that
            tells when it is gone.
        ready: a descriptor to which the keeper writes that the lab exists, or what went wrong.
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
