"""What runs: a schedule, its dispatch, which links are delegated, and how much each rank may hold. With its digest.

Also the job, which stays the same: costs, memory, transport, and the price of a switch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from penstock.control.events import ControlError, Link, require_amount, undirected
from penstock.cost import Costs, Links, Mesh, Ring
from penstock.dispatch import Dispatch
from penstock.engine.tolerance import is_within
from penstock.formats.native import from_json, to_json
from penstock.schedule import Schedule, check
from penstock.schedule.async_ops import OFFLOAD, RELOAD
from penstock.schedule.messages import remove_communication
from penstock.schedule.short_repr import short_repr
from penstock.simulation.lowered import Order
from penstock.simulation.runner import Runner
from penstock.simulation.transport import as_transport

HOST_LINK = 25e9
"""Bytes per second, each way, that the link between a device and host memory is assumed to carry."""


@dataclass(frozen=True)
class Configuration:
    """What all ranks run from one iteration boundary to another.

    Attributes:
        schedule: checked.
        dispatch: how ranks pick ops.
        delegated: links whose messages go through delegates, each as its two ranks, the lower first; sorted.
        caps: most activations that the device of each rank may hold, in the units of the costs. A schedule with
            OFFLOAD and RELOAD ops keeps to them because activations wait in host memory.
        nodes: of a mesh, where its nodes lie, as in `Mesh.nodes`; none where they cannot move.

    Raises:
        ControlError: caps for another number of ranks.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> start.dispatch.value, start.delegated, start.caps
        ('frozen', (), (7.5, 6.5, 5.5, 4.5))
    """

    schedule: Schedule
    dispatch: Dispatch
    delegated: tuple[Link, ...] = ()
    caps: tuple[float, ...] = ()
    nodes: tuple[int, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "dispatch", Dispatch(self.dispatch))
        object.__setattr__(self, "delegated", tuple(sorted({undirected(link) for link in self.delegated})))
        object.__setattr__(self, "caps", tuple(float(cap) for cap in self.caps))
        object.__setattr__(self, "nodes", tuple(self.nodes))
        if len(self.caps) != self.schedule.num_ranks:
            raise ControlError(f"{len(self.caps)} caps; give one per rank, {self.schedule.num_ranks} in all")

    def to_json(self) -> str:
        """One line, the same for equal configurations."""
        value = {
            "schedule": json.loads(to_json(self.schedule)),
            "dispatch": self.dispatch.value,
            "delegated": self.delegated,
            "caps": self.caps,
            **({"nodes": self.nodes} if self.nodes else {}),
        }
        return json.dumps(value, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Configuration:
        """Reads `to_json`, and proves the schedule.

        Raises:
            ControlError: not what `to_json` writes.
            ScheduleError: a schedule that is not valid.
        """
        try:
            value = json.loads(text)
            schedule = from_json(json.dumps(value["schedule"]))
            links = tuple((int(a), int(b)) for a, b in value["delegated"])
            nodes = tuple(int(node) for node in value.get("nodes", ()))
            found = cls(schedule, Dispatch(value["dispatch"]), links, tuple(value["caps"]), nodes)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ControlError(f"{text[:60]!r} is no configuration: {error!r}") from None
        check(schedule)
        return found

    @property
    def num_updates(self) -> int:
        """How often each stage updates in an iteration: 1, or more where updates are among the schedule's ops."""
        windows = self.schedule.windows
        return 1 if windows is None else windows.num_updates

    @cached_property
    def digest(self) -> str:
        """Tells configurations apart: the SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@dataclass(frozen=True)
class Prices:
    """What a switch costs, in milliseconds of the job's time, once each way.

    Attributes:
        dispatch: from one kind of dispatch to another: nothing to be built.
        replan: a schedule proved and handed to all ranks. Iterations do not stop for it.
        delegate: a link's messages taken through delegates: a new group and its first message took 21 ms.
        move: nodes that change places in a mesh: groups are made anew and state is fetched. Four hosts took 1.8 s
            for 6 MB a host, with a link 30 ms late among them.

    Raises:
        ControlError: a price that is below 0 or not a number.

    Examples:
        >>> import penstock as ps
        >>> prices = ps.control.Prices(replan=10.0)
        >>> prices.replan, prices.delegate
        (10.0, 21.0)
    """

    dispatch: float = 0.0
    replan: float = 5.0
    delegate: float = 21.0
    move: float = 2000.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require_amount(f"the price of {name}", value)


@dataclass(frozen=True)
class Job:
    """What does not change while the job runs.

    Attributes:
        costs: per stage.
        start: what runs first, and what the job goes back to on healthy links; its caps are the device's memory.
        host_memory: the most activations of each rank that may wait in host memory while some link is delegated, in
            the units of the costs; one number for all ranks, or one per rank. OFFLOAD and RELOAD ops move them.
        transport: of the links that are not delegated, as `simulate` takes it: "blocking:2" (a sender waits while a
            link holds two messages), "decoupled", or Penstock's own lines, "gloo" and "nccl-edge".
        prices: of switching.
        least_gain: share of the iteration time that a switch must save.
        dispatches: the kinds of dispatch that may be chosen; by default those with which trials were judged
            (benchmarks/adapt), to which hinted may be added.
        may_replan, may_delegate: remedies that may be chosen.
        least_delay: smallest delay, and change of one, that matters (ms); by default a tenth of the mean op.
        mesh: whose nodes are probed and may move, and where they lie when the job starts; None for no mesh.
        nodes_stay: why the nodes of the mesh cannot move, in words; empty where they may.
        ring: how the rings of the mesh move bytes.
        num_starting: the first steps of the run, in which memory is allotted and connections are made. They are
            neither usual nor evidence.

    Raises:
        ControlError: numbers that make no sense, or a start whose own order needs more than its caps.
        CostError: costs for another number of stages, or an unknown transport.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> job.least_gain, [each.value for each in job.dispatches]
        (0.02, ['frozen', 'dynamic'])
    """

    costs: Costs
    start: Configuration
    host_memory: float | tuple[float, ...] = 0.0
    transport: str = "blocking:2"
    prices: Prices = field(default_factory=Prices)
    least_gain: float = 0.02
    dispatches: tuple[Dispatch, ...] = (Dispatch.FROZEN, Dispatch.DYNAMIC)
    may_replan: bool = True
    may_delegate: bool = True
    least_delay: float | None = None
    mesh: Mesh | None = None
    ring: Ring = field(default_factory=Ring)
    nodes_stay: str = ""
    num_starting: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dispatches", tuple(Dispatch(each) for each in self.dispatches))
        if isinstance(self.host_memory, Sequence):
            object.__setattr__(self, "host_memory", tuple(self.host_memory))
        for limit in self.host_limits:
            require_amount("host_memory", limit)
        if len(self.host_limits) != self.num_ranks:
            raise ControlError(
                f"host_memory has {len(self.host_limits)} entries; give one per rank, {self.num_ranks} in all"
            )
        if any(self.host_limits):
            object.__setattr__(self, "costs", with_host_copies(self.costs))
        require_amount("least_gain", self.least_gain)
        as_transport(self.transport)
        self.costs.require_stages(self.start.schedule.num_stages)
        if not fits(self.start, self.costs):
            raise ControlError(
                f"{self.start.schedule.name} needs {tuple(peaks(self.start.schedule, self.costs))} activations, its "
                f"caps are {self.start.caps}; raise them or start with a schedule that fits"
            )
        if self.start.nodes != (() if self.mesh is None else self.mesh.nodes):
            raise ControlError(
                f"the start has its nodes at {self.start.nodes}, and the job's mesh is {self.mesh}: give both alike"
            )
        if self.start.delegated and not self.may_delegate:
            raise ControlError(f"the start delegates {self.start.delegated}, but may_delegate is False")

    @property
    def num_ranks(self) -> int:
        return self.start.schedule.num_ranks

    @property
    def mean_op(self) -> float:
        """The mean time of an op (ms)."""
        costs = self.costs
        return sum(map(sum, (costs.f, costs.i, costs.w))) / (3 * costs.num_stages)

    @property
    def smallest_delay(self) -> float:
        """The smallest delay, and change of one, that matters (ms)."""
        return self.mean_op / 10 if self.least_delay is None else self.least_delay

    def is_starting(self, iteration: int) -> bool:
        """Whether an iteration begins among the first steps, which are no evidence."""
        return iteration * self.start.num_updates < self.num_starting

    def late(self, links: Links) -> Links:
        """The delays that matter."""
        return Links({link: float(ms) for link, ms in sorted(links.delays.items()) if ms >= self.smallest_delay})

    @property
    def host_limits(self) -> tuple[float, ...]:
        """Most that each rank may hold in host memory, in the units of the costs."""
        given = self.host_memory
        return given if isinstance(given, tuple) else (given,) * self.num_ranks


@lru_cache(maxsize=16)
def runner_of(costs: Costs) -> Runner:
    """The runner for these costs. It is kept, since the same few schedules are simulated again and again."""
    return Runner(costs)


def order_of(schedule: Schedule, costs: Costs) -> Order:
    """A schedule as arrays. Raises CostError and ScheduleError, as `Runner.order`."""
    return runner_of(costs).order(remove_communication(schedule))


def peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """Most activations each rank holds in the schedule's own order, in the units of the costs."""
    return order_of(schedule, costs).peaks


def fits(configuration: Configuration, costs: Costs) -> bool:
    """Whether the schedule's own order stays within the caps. A dynamic rank then never exceeds them either."""
    return fits_within(configuration.schedule, costs, configuration.caps)


def fits_within(schedule: Schedule, costs: Costs, caps: Sequence[float]) -> bool:
    return all(is_within(peak, cap) for peak, cap in zip(peaks(schedule, costs), caps, strict=True))


def in_host(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """The most that each rank has in host memory at once, in the units of the costs."""
    found = []
    for row in schedule.order:
        moved = [costs.activation[op.stage] * ((op.kind == OFFLOAD) - (op.kind == RELOAD)) for op in row]
        found.append(max(accumulate(moved), default=0.0))
    return tuple(found)


def with_host_copies(costs: Costs, ms: float | None = None) -> Costs:
    """Costs that say how long an activation takes to host memory (OFFLOAD) and back (RELOAD), where they did not.

    Args:
        ms: milliseconds that one unit of activation takes, one way. By default bytes (activations of more than 1024)
            move at 25 GB/s, which copies of pinned memory reach over PCIe 4. Otherwise a copy takes as long as the
            stage's forward: a transformer layer of width h keeps about 34 bytes for each of its values and computes
            24 h operations for each, so at h = 8192 and 150 TFLOP/s both take about 1.3 us for a thousand values.
    """
    known = {entry[:2] for entry in costs.other_entries}
    keys = [(kind, stage) for kind in (OFFLOAD, RELOAD) for stage in range(costs.num_stages)]
    keys = [(kind, stage) for kind, stage in keys if not known & {(kind, None), (kind, stage)}]
    if ms is None and max(costs.activation) > 1024:
        ms = 1e3 / HOST_LINK
    each = costs.f if ms is None else [ms * size for size in costs.activation]
    return costs.with_other({(kind, stage): each[stage] for kind, stage in keys})


def job_to_json(job: Job) -> dict[str, Any]:
    """The job as a JSON object."""
    value = {each.name: getattr(job, each.name) for each in fields(job)}
    for name in ("costs", "prices", "ring", "mesh"):
        value[name] = value[name] and asdict(value[name])
    start, dispatches = json.loads(job.start.to_json()), [each.value for each in job.dispatches]
    return value | {"start": start, "dispatches": dispatches}


def job_from_json(value: Mapping[str, Any]) -> Job:
    """Reads `job_to_json`. Raises ControlError for fields that are missing or unknown."""
    try:
        given = dict(value)
        given["costs"] = Costs(**given["costs"] | {"other": tuple(map(tuple, given["costs"]["other"]))})
        given["start"] = Configuration.from_json(json.dumps(given["start"]))
        given |= {"prices": Prices(**given["prices"]), "ring": Ring(**given.get("ring", {}))}
        given["mesh"] = Mesh(**given["mesh"]) if given.get("mesh") else None
        return Job(**given)
    except (KeyError, TypeError) as error:
        raise ControlError(f"no job that this version wrote: {error}") from None
