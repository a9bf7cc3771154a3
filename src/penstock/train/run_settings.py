"""What settings of a run have in common on any device: their links, how messages travel, the schedule, their JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from penstock.cost import LinkConditions
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError, check_known, read_links, read_schedule
from penstock.train.travel import Travel


class RunSettings:
    """The base of dataclasses that have these fields, and those of `Travel`."""

    ranks: int
    microbatches: int
    schedule: str
    stages: int | None
    warmup: Sequence[int] | None
    link: str | None
    store: str | None

    def link_conditions(self) -> LinkConditions | None:
        """The conditions to inject. Raises SettingsError for those that make no sense."""
        return read_links(self.link, self.ranks)

    @property
    def travel(self) -> Travel:
        """How messages travel. Raises SettingsError for options that do not go together."""
        names = (field.name for field in dataclasses.fields(Travel))
        return Travel(**{name: getattr(self, name) for name in names})

    def build_schedule(self) -> Schedule:
        """The schedule, checked. Raises ScheduleError."""
        return read_schedule(self.schedule, self.ranks, self.microbatches, self.stages, self.warmup)

    def to_json(self) -> str:
        """All but the store's password, which whoever goes on with the run gives again."""
        from penstock.runtime.stores.address import without_password  # here, for settings are read before torch is

        values: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        if self.store is not None:
            values["store"] = without_password(self.store)
        return json.dumps(values, indent=2)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Reads settings; `where` heads errors. Raises SettingsError for unknown names and wrong types."""
        values = check_known(cls, values, where)
        try:
            return cls(**values)
        except SettingsError as error:
            raise SettingsError(f"{where}{error}") from None
