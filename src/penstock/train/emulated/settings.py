"""What a run on emulated devices is asked to do. One flat value, written into the run's folder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from penstock.cost import CostError, Costs
from penstock.dispatch import Dispatch
from penstock.formats.costs import read_costs
from penstock.schedule import Schedule
from penstock.schedule.op import UPDATE
from penstock.train.checks import (
    SettingsError,
    check_choices,
    check_numbers,
)
from penstock.train.run_settings import RunSettings
from penstock.train.transport_settings import host_memory_of, read_size


@dataclass(frozen=True)
class EmulatedSettings(RunSettings):
    """Settings of a run on emulated devices; every field has a value that works.

    Attributes:
        schedule, ranks, microbatches, stages, warmup, dispatch, link, timeout: as of a training run.
        costs: a preset's name, or a file of costs or of a profile.
        steps: iterations.
        stretch: slows ops and links down alike, so that the machine's own noise weighs less.
        message_cap: most bytes of a message, in words; what is larger is sent, and simulated, as so many.
        in_process: ranks are threads of this process and hand messages over; else processes that send them.
        transport, link_depth, delegates, interfaces, adapt, store, host_memory: see `Travel`.
        window, max_mismatch, drain_every, sharding: as of a training run; an iteration is a pass.
        device: always "emulated".

    Raises:
        SettingsError: numbers that make no sense, or options that do not go together.
    """

    schedule: str = "zb"
    ranks: int = 4
    microbatches: int = 12
    stages: int | None = None
    warmup: tuple[int, ...] | None = None
    dispatch: str = "auto"
    costs: str = "gpt2-7b"
    steps: int = 20
    stretch: float = 1.0
    message_cap: str = "1MB"
    link: str | None = None
    transport: str = "host"
    link_depth: int | None = None
    delegates: int | None = None
    interfaces: str | None = None
    adapt: bool = False
    store: str | None = None
    host_memory: str | None = None
    timeout: float = 60.0
    in_process: bool = False
    device: str = "emulated"
    window: int | None = None
    max_mismatch: int | None = None
    drain_every: int | None = None
    sharding: str = "copies"

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            ("ranks", "microbatches", "steps", "link_depth", "delegates", "window", "drain_every"), 1
        )
        least["max_mismatch"] = 0
        check_numbers(self, least=least, above_zero=("stretch", "timeout"))
        check_choices(
            self,
            {
                "dispatch": (*map(str, Dispatch), "auto"),
                "transport": ("host", "gloo", "direct", "delegate"),
                "sharding": ("none", "copies"),
            },
        )
        self.check_updates()
        self.link_conditions()
        _ = self.travel, self.most_bytes
        if self.in_process and self.transport == "delegate":
            raise SettingsError("delegates are processes beside a rank's; leave out --in-process")

    @property
    def most_bytes(self) -> float:
        """`message_cap` as a number. Raises SettingsError."""
        return read_size("message_cap", self.message_cap)

    def read_costs(self, schedule: Schedule) -> Costs:
        """The costs of the schedule's stages, messages cut down to `message_cap`. Raises SettingsError.

        Where nothing is shared out a copy of a stage makes each update itself, which takes as long as on its owner.
        """
        costs = self._whole_costs(schedule)
        if costs.factors.message and self.is_cut(schedule):
            raise SettingsError(
                f"some messages of these costs are larger than --message-cap {self.message_cap}, and they differ by "
                "microbatch; raise --message-cap, or leave the message factors out of the costs"
            )
        if self.sharding == "none":
            steps = [costs.duration(UPDATE, stage) for stage in range(costs.num_stages)]
            costs = dataclasses.replace(costs, take_over=steps)
        return dataclasses.replace(
            costs,
            message_bytes=[min(size, self.most_bytes) for size in costs.message_bytes],
            update_bytes=[min(size, self.most_bytes) for size in costs.update_bytes],
        )

    def is_cut(self, schedule: Schedule) -> bool:
        """Whether messages are larger than `message_cap`. Raises SettingsError."""
        costs = self._whole_costs(schedule)
        count, sizes = schedule.num_microbatches, costs.message_bytes
        heaviest = [costs.factors.table("message", kind, costs.num_stages, count).max(axis=1) for kind in "FB"]
        sent = [size * factor for row in heaviest for size, factor in zip(sizes, row.tolist(), strict=True)]
        sent += costs.update_bytes if schedule.updates is not None else ()
        return max(sent) > self.most_bytes

    def _whole_costs(self, schedule: Schedule) -> Costs:
        try:
            return read_costs(self.costs, schedule.num_stages)
        except CostError as error:
            raise SettingsError(f"--costs: {error}") from None

    def host_units(self, costs: Costs) -> float:
        """Host memory in the units of the costs. Raises SettingsError."""
        return host_memory_of(self.host_memory, costs)
