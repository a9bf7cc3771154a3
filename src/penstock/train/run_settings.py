"""What settings of a run have in common on any device: their links, how messages travel, the schedule, their JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from penstock.cost import Links
from penstock.schedule import Schedule
from penstock.train.asynchronous import check_updates
from penstock.train.checks import SettingsError, check_known, read_links, read_schedule
from penstock.train.passes import Passes
from penstock.train.transport_settings import Travel


class RunSettings:
    """The base of dataclasses that have these fields, and those of `Travel`."""

    ranks: int
    microbatches: int
    schedule: str
    stages: int | None
    warmup: Sequence[int] | None
    link: str | None
    store: str | None
    dispatch: str
    adapt: bool
    window: int | None
    max_mismatch: int | None
    drain_every: int | None
    sharding: str

    def link_conditions(self) -> Links | None:
        """The conditions to inject. Raises SettingsError for those that make no sense."""
        return read_links(self.link, self.ranks)

    @property
    def travel(self) -> Travel:
        """How messages travel. Raises SettingsError for options that do not go together."""
        names = (field.name for field in dataclasses.fields(Travel))
        return Travel(**{name: getattr(self, name) for name in names})

    @property
    def is_asynchronous(self) -> bool:
        """Whether the schedule has its updates among the other ops."""
        return self.window is not None

    @property
    def passes(self) -> Passes:
        """How steps, windows and passes lie. Without updates in the schedule, all three are a step."""
        return Passes(self.microbatches, self.drain_every or 1, self.window or self.microbatches)

    def check_updates(self) -> None:
        """Raises SettingsError for options about updates that do not go together."""
        check_updates(self)

    def build_schedule(self) -> Schedule:
        """The schedule of a pass, checked. Raises ScheduleError."""
        if not self.is_asynchronous:
            return read_schedule(self.schedule, self.ranks, self.microbatches, self.stages, self.warmup)
        passes = self.passes
        return read_schedule(
            self.schedule,
            self.ranks,
            passes.num_microbatches,
            self.stages,
            self.warmup,
            passes.window_in_pass,
            self.max_mismatch,
        )

    def to_json(self) -> str:
        """All but the store's password, which whoever goes on with the run gives again."""
        from penstock.runtime.adapt.store.store import without_password  # here, for settings are read before torch is

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
