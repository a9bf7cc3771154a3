"""Settings that runs on all devices have in common: the schedule, how messages travel, how runs adapt."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from penstock.cost import CostError, Costs, Links
from penstock.cost.conditions import read_quantity
from penstock.dispatch import Dispatch
from penstock.schedule import Schedule
from penstock.train.asynchronous import Passes, check_updates
from penstock.train.checks import (
    SettingsError,
    check_choices,
    check_known,
    check_numbers,
    read_links,
    read_schedule,
    refuse_options,
)

if TYPE_CHECKING:
    from penstock.runtime.transport.choose import DelegateOptions, TransportOptions

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
    """Settings that any run has.

    Attributes:
        transport: see `ROUTES`. link_depth: most messages under way on a late link; None: 2 if it is direct,
            otherwise no limit.
        delegates: TCP connections for each direction of a delegated link; None: see `DelegateOptions`.
        interfaces: of this host, names or addresses separated by commas, the preferred one first. If one fails,
            delegated messages use the next. None: see `DelegateOptions`.
        adapt: change schedule, dispatch and delegated links if that is faster over the measured links.
        store: redis://HOST:PORT for the ranks' reports; None: the job's own.
        host_memory: how much may wait in each host's memory while a link is delegated: activations, or bytes.
        schedule: a library schedule's name, or a schedule file.
        ranks, microbatches, stages, warmup: what the schedule is built for. schedule_options: the library schedule's
            other options, such as {"overlap": true}.
        dispatch: "frozen", "hinted", "dynamic", or "auto": the fastest of them by simulation.
        steps: to run.
        sharding: what the holders of a stage divide among themselves, see `ParallelOptions`.
        device: what ops run on.
        in_process: all ranks in one process; otherwise one process each.
        timeout: most seconds that any wait may last.
        link: conditions to inject into links, like "0:1=latency:30ms 1:2=loss:1%"; None for none.
        window: for an asynchronous schedule, the microbatches whose gradients an update adds up; None if updates are
            not ops of the schedule. max_mismatch: most updates between a forward and its backward; None: the
            schedule's own bound.
        drain_every: steps of a pass, after which the pipeline drains; see `Passes`.
        rule: which weights ops of an asynchronous schedule read, one of `schedule.RULES`; None: the schedule's own.
    """

    transport: str = "host"
    link_depth: int | None = None
    delegates: int | None = None
    interfaces: str | None = None
    adapt: bool = False
    store: str | None = None
    host_memory: str | None = None
    schedule: str = "1f1b"
    ranks: int = 4
    microbatches: int = 8
    stages: int | None = None
    warmup: tuple[int, ...] | None = None
    schedule_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dispatch: str = "frozen"
    steps: int = 400
    sharding: str = "copies"
    device: str = "cpu"
    in_process: bool = False
    timeout: float = 60.0
    link: str | None = None
    window: int | None = None
    max_mismatch: int | None = None
    drain_every: int | None = None
    rule: str | None = None

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
        common = ("ranks", "microbatches", "steps", "link_depth", "delegates", "window", "drain_every")
        least = dict.fromkeys((*common, *counts), 1) | dict.fromkeys(("max_mismatch", *amounts), 0)
        check_numbers(self, least=least, above_zero=("timeout", *above_zero))
        check_choices(self, {"dispatch": (*map(str, Dispatch), "auto"), **(choices or {})})
        check_updates(self)
        self._check_schedule_options()
        self.link_conditions()
        self.check_transport()

    def _check_schedule_options(self) -> None:
        """Raises SettingsError for options of the schedule that have a setting of their own."""
        own = {"num_ranks": "ranks", "num_microbatches": "microbatches", "num_stages": "stages"}
        own |= {name: name for name in ("warmup", "window", "max_mismatch", "rule")}
        if both := sorted(own.keys() & self.schedule_options):
            raise SettingsError(f"--option {both[0]}: give --{own[both[0]].replace('_', '-')}")

    def check_transport(self) -> None:
        """Raises SettingsError for options that exclude each other."""
        if not self.may_delegate:
            why = f"delegates are for --transport delegate or --adapt, not for {self.transport}"
            refuse_options(self, ("delegates", "interfaces"), why)
        for name in ("store", "host_memory"):
            if getattr(self, name) is not None and not self.adapt:
                raise SettingsError(f"{name} is for a run that adapts; add --adapt")
        if self.store is not None and STORES.fullmatch(self.store) is None:
            from penstock.runtime.adapt.store import without_password  # here, for it imports torch

            shown = without_password(self.store)
            raise SettingsError(f"store {shown!r}: write redis://HOST:PORT")
        host_memory_of(self.host_memory, None)

    @property
    def may_delegate(self) -> bool:
        """Whether links may use delegates: all of them, or single ones if that is faster."""
        return self.transport == "delegate" or self.adapt

    def transport_options(self, links: Links | None = None) -> TransportOptions:
        """What carries messages, under these conditions of links. Imports torch."""
        from penstock.runtime.transport.choose import TransportOptions

        delegates = self.delegate_options() if self.may_delegate else None
        return TransportOptions(self.transport, delegates, self.link_depth, links)

    def delegate_options(self) -> DelegateOptions:
        """How delegates carry messages. Imports torch."""
        from penstock.runtime.transport.choose import DelegateOptions

        found = DelegateOptions()
        if self.delegates is not None:
            found = replace(found, num=self.delegates)
        if self.interfaces is not None:
            found = replace(found, interfaces=tuple(filter(None, self.interfaces.split(","))))
        return found

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
                self.schedule, self.ranks, self.microbatches, self.stages, self.warmup, others=self.schedule_options
            )
        passes = self.passes
        return read_schedule(
            self.schedule,
            self.ranks,
            passes.num_microbatches,
            self.stages,
            self.warmup,
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
