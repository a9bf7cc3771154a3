"""Settings that runs on all devices have in common: the schedule, how messages travel, how runs adapt."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.cost import CostError, Costs, Links
from penstock.cost.conditions import read_quantity
from penstock.dispatch import Dispatch
from penstock.schedule import Schedule
from penstock.schedule.updates import RULES
from penstock.train.asynchronous import Passes, check_windows
from penstock.train.checks import (
    SettingsError,
    check_choices,
    check_known,
    check_numbers,
    read_links,
    read_schedule,
)
from penstock.train.exclusions import COMMON, check_exclusions
from penstock.train.options import LINKS, MACHINE, MESH, SCHEDULE, TRAINING, UPDATES, setting

if TYPE_CHECKING:
    from penstock.runtime.transport.choose import TransportOptions

BASE = "host", "gloo", "direct"
"""Transports whose single links may be delegated."""
ROUTES = *BASE, "delegate", "nccl"
"""Those of a run with real compute."""
STORES = re.compile(r"rediss?://\S+")
SIZES = {f"{prefix}B": size for prefix, size in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))} | {
    f"{prefix}iB": size for prefix, size in (("K", 2.0**10), ("M", 2.0**20), ("G", 2.0**30), ("T", 2.0**40))
}


@dataclass(frozen=True)
class RunSettings:
    """Settings that any run has. Without `window` updates are not ops of the schedule."""

    transport: str = setting("host", "What carries messages: host, gloo, direct, delegate or nccl.", LINKS)
    adapt: bool = setting(False, "Measure links, and change to a faster plan.", LINKS, is_common=True)
    store: str | None = setting(
        None, "Where ranks that adapt report. [the job's own store]", LINKS, metavar="redis://HOST:PORT"
    )
    host_memory: str | None = setting(
        None,
        "How many activations (4) or bytes (8GB) may wait in each host's memory while a link is delegated.",
        LINKS,
        metavar="N",
    )
    schedule: str = setting("1f1b", "Library schedule by name, or a schedule file.", SCHEDULE, is_common=True)
    ranks: int = setting(
        4, "Number of ranks, of the pipeline, a process each.", SCHEDULE, is_common=True, flags=("--ranks", "--pp")
    )
    microbatches: int = setting(8, "Number of microbatches, per step. [8; amdp: 4 a rank]", SCHEDULE, is_common=True)
    stages: int | None = setting(None, "Number of stages, over the whole model (interleaved-1f1b).", SCHEDULE)
    schedule_options: Mapping[str, Any] = setting(
        {},
        "Another option of a library schedule, as for ps.build: overlap=true, warmup=[7,5,3,1]; may be repeated.",
        SCHEDULE,
        flags=("--option",),
        metavar="KEY=VALUE",
        is_repeated=True,
    )
    dispatch: str = setting(
        "frozen",
        "How ranks choose their ops: frozen, hinted, dynamic or auto.",
        SCHEDULE,
        is_common=True,
    )
    steps: int = setting(400, "How many steps to run.", TRAINING, is_common=True)
    sharding: str = setting("copies", "What the holders of a stage divide: none, copies, zero1 or fsdp.", MESH)
    device: str = setting(
        "cpu",
        "Device that ops run on: cpu (even where there are GPUs) or cuda.",
        MACHINE,
        is_common=True,
    )
    in_process: bool = setting(False, "Run all ranks in one process, in turn.", SCHEDULE)
    timeout: float = setting(60.0, "Most seconds that any wait may last.", MACHINE)
    link: str | None = setting(
        None,
        "What messages between A and B meet, made slow on purpose: 0:1=latency:30ms+loss:1%; may be repeated.",
        LINKS,
        is_common=True,
        metavar="A:B=CONDITION",
        is_repeated=True,
    )
    window: int | None = setting(None, "Microbatches whose gradients an update adds up.", UPDATES)
    rule: str | None = setting(None, f"Which weights ops read: {', '.join(RULES)}.", UPDATES, metavar="NAME")
    max_mismatch: int | None = setting(
        None, "Most updates between a microbatch's forward and its backward. [amdp: 0; with --rule 1]", UPDATES
    )
    drain_every: int | None = setting(None, "Steps after which the pipeline drains. [about 8]", UPDATES)

    def check_run(
        self,
        counts: Sequence[str] = (),
        amounts: Sequence[str] = (),
        above_zero: Sequence[str] = (),
        choices: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Checks what any run has, and some fields of one kind of run: those that must be at least 1, at least 0 or
        above 0, and those that take only certain words. Raises SettingsError.
        """
        common = ("ranks", "microbatches", "steps", "window", "drain_every")
        least = dict.fromkeys((*common, *counts), 1) | dict.fromkeys(("max_mismatch", *amounts), 0)
        check_numbers(self, least=least, above_zero=("timeout", *above_zero))
        check_choices(self, {"dispatch": (*map(str, Dispatch), "auto"), **(choices or {})})
        check_exclusions(self, COMMON)
        check_windows(self)
        self._check_schedule_options()
        self.link_conditions()
        self.check_transport()

    def _check_schedule_options(self) -> None:
        """Raises SettingsError for options of the schedule that have a setting of their own."""
        own = {"num_ranks": "ranks", "num_microbatches": "microbatches", "num_stages": "stages"}
        own |= {name: name for name in ("window", "max_mismatch", "rule")}
        if both := sorted(own.keys() & self.schedule_options):
            raise SettingsError(f"--option {both[0]}: give --{own[both[0]].replace('_', '-')}")

    def check_transport(self) -> None:
        """Raises SettingsError for a store or a host memory that can't be read."""
        if self.store is not None and STORES.fullmatch(self.store) is None:
            from penstock.runtime.adapt.store import without_password  # here, for it imports torch

            shown = without_password(self.store)
            raise SettingsError(f"store {shown!r}: write redis://HOST:PORT")
        host_memory_of(self.host_memory, None)

    def transport_options(self, links: Links | None = None) -> TransportOptions:
        """What carries messages, under these conditions of links. Imports torch.

        Single links of a run that adapts may use delegates where that is faster.
        """
        from penstock.runtime.transport.choose import DelegateOptions, TransportOptions

        delegates = DelegateOptions() if self.transport == "delegate" or self.adapt else None
        return TransportOptions(self.transport, delegates, links=links)

    @property
    def num_processes(self) -> int:
        """Of the whole run."""
        return self.ranks

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that its processes need."""
        return {}

    def link_conditions(self) -> Links | None:
        """The conditions to inject. Raises SettingsError for invalid ones."""
        return read_links(self.link, self.ranks)

    def injected(self) -> list[str]:
        """What is injected into the links, in words. The simulation applies the same from its time 0 on."""
        conditions = self.link_conditions()
        return [] if conditions is None else [f"link {text} was injected" for text in conditions.texts()]

    @property
    def is_asynchronous(self) -> bool:
        """Whether the schedule has its updates among the other ops."""
        return self.window is not None

    @property
    def passes(self) -> Passes:
        """How steps form windows and passes. Without updates in the schedule, each step is a window and a pass."""
        return Passes(self.microbatches, self.drain_every or 1, self.window or self.microbatches)

    def replica_schedule(self) -> Schedule:
        """The schedule of a pass of one replica, checked. Raises ScheduleError."""
        if not self.is_asynchronous:
            return read_schedule(
                self.schedule, self.ranks, self.microbatches, self.stages, others=self.schedule_options
            )
        passes = self.passes
        return read_schedule(
            self.schedule,
            self.ranks,
            passes.num_microbatches,
            self.stages,
            passes.window_in_pass,
            self.max_mismatch,
            self.rule,
            self.schedule_options,
        )

    def to_json(self) -> str:
        """Everything except the store's password, which must be given again to resume the run."""
        from penstock.runtime.adapt.store import without_password  # here, for settings are read before torch is

        values = dataclasses.asdict(self)
        if self.store is not None:
            values["store"] = without_password(self.store)
        return json.dumps(values, indent=2)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Reads settings. Errors begin with `where`. Raises SettingsError for unknown names and wrong types."""
        values = check_known(cls, values, where)
        try:
            return cls(**values)
        except SettingsError as error:
            raise SettingsError(f"{where}{error}") from None


def host_memory_of(text: str | None, costs: Costs | None) -> float:
    """Host memory in the units of the costs: `4` is activations of the largest stage, `8GB` is bytes.

    Without costs a stage's activation counts as 1.

    Raises:
        SettingsError: no number of at least 0, or bytes where the activations' bytes are not known.
    """
    if text is None:
        return 0.0
    largest = 1.0 if costs is None else max(costs.activation)
    try:
        return read_quantity(text, {"": 1.0}) * largest
    except CostError:
        pass
    size = read_size("host_memory", text, "activations, like 4, or ")
    if costs is not None and largest <= 1024:
        raise SettingsError(
            f"host_memory {text}: how many bytes an activation has is not known here; give activations, like 4"
        )
    return size


def read_size(name: str, text: str, or_else: str = "") -> float:
    """Reads `8GB`, `8GiB` or `1000B`. Raises SettingsError."""
    try:
        return read_quantity(text, SIZES)
    except CostError:
        raise SettingsError(f"{name} {text!r}: give {or_else}bytes, like 8GB or 8GiB") from None
