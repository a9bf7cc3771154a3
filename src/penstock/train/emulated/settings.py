"""What a run on emulated devices is asked to do. One flat value, written into the run's folder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from penstock.cost import CostError, Costs
from penstock.cost.presets import PRESETS
from penstock.formats.costs import read_costs
from penstock.schedule import Schedule
from penstock.schedule.op import UPDATE
from penstock.train.checks import SettingsError
from penstock.train.options import EMULATED, setting
from penstock.train.run_settings import BASE, RunSettings, host_memory_of, read_size


@dataclass(frozen=True)
class EmulatedSettings(RunSettings):
    """Settings of a run on emulated devices; every field has a value that works.

    Attributes:
        steps: iterations. With an asynchronous schedule, each is a pass.
        costs: a preset's name, or a file of costs or of a profile.
        stretch: factor by which ops and links are slowed down, so that the machine's own noise matters less.
        message_cap: most bytes of a message, such as "1MB". Larger messages are sent, and simulated, with this size.
        in_process: ranks are threads of this process, which hand messages over; otherwise processes that send them.
        device: always "emulated".

    Raises:
        SettingsError: numbers out of range, or options that exclude each other.
    """

    schedule: str = "zb"
    microbatches: int = 12
    dispatch: str = "auto"
    steps: int = 20
    device: str = "emulated"
    costs: str = setting("gpt2-7b", f"All costs: {', '.join(PRESETS)}, or a file.", EMULATED, metavar="NAME|FILE")
    stretch: float = setting(1.0, "Make ops and links slower by this factor, so that noise matters less.", EMULATED)
    message_cap: str = setting(
        "1MB", "Most bytes of a message; larger ones are cut to this.", EMULATED, metavar="BYTES"
    )

    def __post_init__(self) -> None:
        self.check_run(
            above_zero=("stretch",),
            choices={"transport": (*BASE, "delegate"), "sharding": ("none", "copies")},
        )
        _ = self.most_bytes
        if self.in_process and self.transport == "delegate":
            raise SettingsError("delegates are processes beside a rank's; leave out --in-process")

    @property
    def most_bytes(self) -> float:
        """`message_cap` as a number. Raises SettingsError."""
        return read_size("message_cap", self.message_cap)

    def check_plan(self) -> None:
        """Checks what can be checked before torch is loaded. Raises SettingsError, ScheduleError."""
        self.read_costs(self.replica_schedule())

    def read_costs(self, schedule: Schedule) -> Costs:
        """The costs of the schedule's stages, with messages cut to `message_cap`. Raises SettingsError.

        With sharding "none" each copy of a stage makes every update itself, which takes as long as on its owner.
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
        costs = dataclasses.replace(
            costs,
            message_bytes=[min(size, self.most_bytes) for size in costs.message_bytes],
            update_bytes=[min(size, self.most_bytes) for size in costs.update_bytes],
        )
        return costs.with_predictions(schedule, self.sharding, self.most_bytes)

    def known_before(self, schedule: Schedule) -> list[str]:
        """The notices of a run that are known when it begins. Raises SettingsError."""
        cut = [f"messages of more than {self.message_cap} are sent, and simulated, as so many"]
        return [*self.injected(), *(cut if self.is_cut(schedule) else [])]

    def is_cut(self, schedule: Schedule) -> bool:
        """Whether messages are larger than `message_cap`. Raises SettingsError."""
        costs = self._whole_costs(schedule)
        count, sizes = schedule.num_microbatches, costs.message_bytes
        heaviest = [costs.factors.table("message", kind, costs.num_stages, count).max(axis=1) for kind in "FB"]
        sent = [size * factor for row in heaviest for size, factor in zip(sizes, row.tolist(), strict=True)]
        if schedule.windows is not None:
            predicted = costs.with_predictions(schedule, self.sharding).factors
            most = predicted.table("message", UPDATE, costs.num_stages, schedule.windows.num_ops).max(axis=1).tolist()
            sent += [size * factor for size, factor in zip(costs.update_bytes, most, strict=False)]
        return max(sent) > self.most_bytes

    def _whole_costs(self, schedule: Schedule) -> Costs:
        try:
            return read_costs(self.costs, schedule.num_stages)
        except CostError as error:
            raise SettingsError(f"--costs: {error}") from None

    def host_units(self, costs: Costs) -> float:
        """Host memory in the units of the costs. Raises SettingsError."""
        return host_memory_of(self.host_memory, costs)
