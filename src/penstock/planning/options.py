"""What a plan is asked for: the options of `ps.plan` as one value, forms of ops, deals, and limits of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from inspect import Parameter, Signature, signature
from numbers import Real
from typing import Any, TypedDict, TypeVar

from penstock.cost import CostError, Costs, Links
from penstock.dispatch import Dispatch
from penstock.engine.tolerance import is_within
from penstock.planning.result import Progress
from penstock.schedule import Placement, ScheduleError, StageGraph
from penstock.schedule.async_ops import MOVES, OFFLOAD, RELOAD
from penstock.schedule.messages import BUFFERED
from penstock.schedule.op import BUILT_IN
from penstock.simulation.simulator import as_dispatch

MOST_AGAIN = 6
"""Times that a search begins again with less room, where messages take more than a limit of bytes leaves."""

F = TypeVar("F", bound=Callable[..., Any])

PerRank = float | Sequence[float]
"""One number for every rank, or one for each."""


class PlanOptions(TypedDict, total=False):
    """The keywords of `ps.plan`, which says what they mean."""

    max_in_flight: PerRank | None
    memory_limit: PerRank | None
    total_limit: PerRank | None
    time_limit: float
    objective: str
    dispatch: Dispatch | str
    channels: str
    placement: Placement | str | None
    split: bool | None
    recompute: bool | None
    offload: bool | PerRank | None
    deal: str | Sequence[int]
    stages: StageGraph | None
    seed: int
    stop_at_gap: float
    progress: Callable[[Progress], None] | None


@dataclass(frozen=True)
class PlanRequest:
    """All that `ps.plan` was asked, as one value.

    Attributes:
        placement: None only where stages branch and the search is to choose where they go.
        stages: None for a chain.

    Raises:
        ScheduleError: an option that makes no sense by itself, or two limits of memory.
    """

    costs: Costs
    num_ranks: int
    num_microbatches: int
    links: Links
    placement: Placement | None = None
    stages: StageGraph | None = None
    max_in_flight: PerRank | None = None
    memory_limit: PerRank | None = None
    total_limit: PerRank | None = None
    time_limit: float = 10.0
    objective: str = "makespan"
    dispatch: Dispatch | str = Dispatch.FROZEN
    channels: str = BUFFERED
    split: bool | None = None
    recompute: bool | None = None
    offload: bool | PerRank | None = None
    deal: str | Sequence[int] = "any"
    seed: int = 0
    stop_at_gap: float = 1e-4
    progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        def require(is_so: bool, name: str, instead: str) -> None:
            if not is_so:
                raise ScheduleError(f"{name} is {getattr(self, name)!r}: give {instead}", rule="options")

        require(_is_number(self.time_limit) and self.time_limit > 0, "time_limit", "seconds above 0")
        require(self.objective in ("makespan", "span"), "objective", "'makespan' or 'span'")
        require(self.progress is None or callable(self.progress), "progress", "a function of a Progress")
        require(_is_number(self.stop_at_gap) and self.stop_at_gap >= 0, "stop_at_gap", "a share of at least 0")
        for name in ("split", "recompute"):
            require(getattr(self, name) is None or isinstance(getattr(self, name), bool), name, "True, False or None")
        require_one_limit(
            total_limit=self.total_limit, max_in_flight=self.max_in_flight, memory_limit=self.memory_limit
        )

    @property
    def mode(self) -> Dispatch:
        return as_dispatch(self.dispatch)

    @property
    def is_plain(self) -> bool:
        """Whether the makespan of a frozen order is planned."""
        return self.objective == "makespan" and not self.mode.is_dynamic

    @property
    def is_chain(self) -> bool:
        """Whether stages form a chain, each run by one rank."""
        return self.stages is None and not (self.placement is not None and self.placement.shared)

    @property
    def offloads(self) -> bool:
        """Whether activations may go to host memory."""
        return self.offload is not None and self.offload is not False


def names_options(options: Any) -> Callable[[F], F]:
    """Puts the fields of a dataclass into the signature of a function of `**options`."""

    def name(function: F) -> F:
        named = [each for each in signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
        known = {each.name for each in named}
        named += [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(options)
            if each.name not in known
        ]
        function.__signature__ = Signature(named)  # type: ignore[attr-defined]
        return function

    return name


@dataclass(frozen=True)
class OpForms:
    """The forms that ops may take.

    Attributes:
        again: whether forwards may run again.
        whole, split: whether backwards may be B, and I and W.
        away: whether activations may go to host memory.
    """

    again: bool
    whole: bool
    split: bool
    away: bool = False


@dataclass(frozen=True)
class Family:
    """What a call leaves open.

    Attributes:
        forms: that ops may have.
        joint: whether forms are decided with the order; else every backward is split, or every one whole.
        backward, recompute, offload: as in the certificate.
    """

    forms: OpForms
    joint: bool
    backward: str
    recompute: str
    offload: str = "none"


def family_of(request: PlanRequest) -> Family:
    """What is open of what was asked, and of that what can help.

    A B that takes no less than I and W is no better than the two side by side. Forwards run again only to hold less
    memory: without a limit, or where limits count forwards, leaving them out is no worse.
    """
    costs, split, capped = request.costs, request.split, request.memory_limit is not None
    said = request.recompute is True or costs.kept_by_recompute is not None
    again = request.is_plain and request.recompute is not False and (said or not capped)
    either = request.is_plain and split is None
    gains = any(costs.b[s] < costs.i[s] + costs.w[s] for s in range(costs.num_stages))
    forms = OpForms(
        again=again and capped and costs.kept < 1, whole=split is False or either, split=split is not False,
        away=request.offloads and (capped or request.max_in_flight is not None),
    )  # fmt: skip
    backward = "any" if either else "whole" if split is False else "split"
    joint = forms.again or forms.away or (either and gains)
    return Family(forms, joint, backward, "any" if again else "none", "any" if request.offloads else "none")


def require_plannable(request: PlanRequest) -> None:
    """Raises ScheduleError or CostError for options, costs and links that are not planned together."""
    costs, placement = request.costs, request.placement
    span, dispatch = f"objective {request.objective!r}", f"dispatch {request.mode.value!r}"
    branches = "stages that branch" if request.stages is not None else "a placement with shared stages"
    channel, again, away = f"channels {request.channels!r}", "recompute=True", f"offload={request.offload!r}"
    pairs, uneven, deal = "costs with an overlap", "costs with uneven microbatches", f"deal {request.deal!r}"
    pipelines = 1 if placement is None else placement.num_pipelines
    counts = read_deal(request.deal, request.num_microbatches, pipelines)
    require_ops(costs, request.stages)
    asked = {
        span: request.objective != "makespan",
        dispatch: request.mode.is_dynamic,
        branches: not request.is_chain,
        channel: request.channels != BUFFERED,
        again: request.recompute is True,
        away: request.offloads,
        pairs: costs.overlap is not None,
        uneven: bool(costs.factors),
        deal: counts is not None and counts != in_turn(request.num_microbatches, pipelines),
    }
    plain = "planned for the makespan of a frozen order"
    chain = f"{plain}, of a chain of stages that one rank runs each"
    rules = (
        (channel, (span, dispatch, branches), f"messages of another framework are {chain}; leave channels out"),
        (
            again, (span, dispatch, branches),
            f"forwards that run again are {chain}; leave recompute out, or use ps.passes.recompute on the schedule",
        ),
        (away, (span, dispatch, branches), f"offloads are {chain}; leave offload out"),
        (
            pairs, (span, dispatch, branches, away, uneven),
            f"pairs are {chain}, as others could be quicker than the lower bound; plan for "
            "dataclasses.replace(costs, overlap=None), and then join pairs with "
            "ps.passes.overlap_pairs(plan.schedule, costs)",
        ),
        (
            uneven, (span, branches, again, away, deal),
            "this is planned for microbatches that all cost the same; leave `uneven` out, and order the microbatches "
            "of the plan with ps.planning.order_microbatches",
        ),
        (branches, (span, dispatch, deal), f"{branches} are {plain}, with microbatches dealt in turn"),
    )  # fmt: skip
    for what, others, instead in rules:
        for other in others:
            if asked[what] and asked[other]:
                message = f"{what} with {other}: {instead}"
                raise CostError(message) if what in (pairs, uneven) else ScheduleError(message, rule="options")
    request.links.check_ranks(request.num_ranks)
    if not asked[channel]:
        request.links.require_constant("ps.plan")
    if request.total_limit is not None and placement is None:
        raise ScheduleError(
            "total_limit with stages that branch needs a placement, as weights lie where it says; give one",
            rule="options",
        )
    if request.offloads:
        _require_times_of_offloads(costs, request.offload)


def require_ops(costs: Costs, stages: StageGraph | None) -> None:
    """Raises CostError for costs of a user's own kind of op that a plan of these stages would not have."""
    planned = {*BUILT_IN, *MOVES, *(each.kind for each in (stages.registered if stages is not None else ()))}
    if missing := sorted({kind for kind, *_ in costs.other_entries} - planned):
        raise CostError(
            f"the costs have times of {' and '.join(missing)}, and the plan would have no such ops: give stages= and "
            "placement= of the program or schedule that has them (--placement FILE), or leave these times out of "
            "Costs.other"
        )


def _require_times_of_offloads(costs: Costs, offload: object) -> None:
    """Raises CostError where the costs do not say how long the way to host memory and back takes."""
    said = {(kind, stage) for kind, stage, _, _ in costs.other_entries}
    for kind in (OFFLOAD, RELOAD):
        for stage in range(costs.num_stages):
            if not said & {(kind, stage), (kind, None)}:
                raise CostError(
                    f"offload is {offload!r}, and the costs do not say how long {kind} of stage {stage} takes; say "
                    'so, like ps.Costs(..., other={"OFFLOAD": 2.5, "RELOAD": 2.5}), milliseconds of one activation'
                )


def in_turn(num_microbatches: int, num_pipelines: int) -> tuple[int, ...]:
    """How many microbatches each pipeline has where they are dealt in turn."""
    return tuple(len(range(p, num_microbatches, num_pipelines)) for p in range(num_pipelines))


def dealt(counts: Sequence[int]) -> tuple[int, ...]:
    """The pipeline of each microbatch: in turn, but for pipelines that have all theirs."""
    return tuple(p for turn in range(max(counts)) for p, count in enumerate(counts) if turn < count)


def read_deal(deal: str | Sequence[int], num_microbatches: int, num_pipelines: int) -> tuple[int, ...] | None:
    """The counts that are given, or None where all deals are to be thought of.

    Raises:
        ScheduleError: not "any", "in turn" or one count for each pipeline that add up to the microbatches.
    """
    if deal == "in turn" or (num_pipelines == 1 and deal == "any"):
        return in_turn(num_microbatches, num_pipelines)
    if deal == "any":
        return None
    counts = () if isinstance(deal, str) else tuple(deal)
    if (
        len(counts) != num_pipelines
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts)
        or sum(counts) != num_microbatches
    ):
        raise ScheduleError(
            f"deal is {deal!r}: give 'any', 'in turn', or how many microbatches each of the {num_pipelines} "
            f"pipelines has, {num_microbatches} together",
            rule="options",
        )
    return counts


@dataclass(frozen=True)
class Limits:
    """Caps per rank, and what a forward of each stage holds in their unit, with the share of it that I frees.

    `host` caps what of a rank is in host memory; empty where nothing goes there.
    """

    cap: tuple[float, ...]
    held: tuple[tuple[float, float], ...]
    in_flight: float | None = None
    host: tuple[float, ...] = ()

    def counted(self, costs: Costs) -> Costs:
        """The costs, with activations in the unit of the caps."""
        return replace(costs, activation=[held for held, _ in self.held], freed_by_input=self.held[0][1])


def limits_of(
    costs: Costs,
    placement: Placement | None,
    num_ranks: int,
    max_in_flight: PerRank | None,
    memory_limit: PerRank | None,
    split: bool,
    kept: float = 1.0,
    offload: bool | PerRank | None = None,
) -> Limits:
    """Reads the limits. Without any, caps are infinite.

    Args:
        placement: of a chain of stages, to refuse caps that leave no schedule; None leaves that to whoever asks.
        offload: most that each rank has in host memory, in the unit of the limit; True for any amount.
        split: whether backwards may be I and W.
        kept: the share of an activation that a forward keeps at least: 1 but where it may run again.

    Raises:
        ScheduleError: both are given, a wrong number of entries, or a cap below what one microbatch holds.
    """
    require_one_limit(max_in_flight=max_in_flight, memory_limit=memory_limit)
    host: tuple[float, ...] = ()
    if offload is not None and offload is not False:
        host = (math.inf,) * num_ranks if offload is True else per_rank("offload", offload, num_ranks)
    name, given = ("memory_limit", memory_limit) if max_in_flight is None else ("max_in_flight", max_in_flight)
    cap = (math.inf,) * num_ranks if given is None else per_rank(name, given, num_ranks)
    if max_in_flight is None:
        share = costs.freed_by_input if split else 0.0
        limits = Limits(cap, tuple((float(a), float(share)) for a in costs.activation), host=host)
    else:
        in_flight = max(cap) if min(cap) == max(cap) < math.inf else None
        limits = Limits(cap, ((1.0, 0.0),) * costs.num_stages, in_flight, host)
    if placement is not None and given is not None:
        _check_room(limits, placement, name, kept)
    return limits


def require_one_limit(**limits: object) -> None:
    """Raises ScheduleError where more than one limit of memory is given, each by the name of its option."""
    given = [f"{name} {value}" for name, value in limits.items() if value is not None]
    if len(given) > 1:
        raise ScheduleError(f"{' and '.join(given[:2])} both limit memory; give one of them", rule="options")


def per_rank(name: str, value: PerRank, num_ranks: int) -> tuple[float, ...]:
    """A limit of each rank. Raises ScheduleError for another number of them, or one that is not above 0."""
    values = [value] * num_ranks if isinstance(value, Real) else list(value)  # type: ignore[arg-type]
    if len(values) != num_ranks:
        raise ScheduleError(
            f"{name} has {len(values)} entries; give one number, or one per rank: {num_ranks}", rule="options"
        )
    for rank, cap in enumerate(values):
        if not _is_number(cap) or not float(cap) > 0:
            raise ScheduleError(f"{name} of rank {rank} is {cap!r}: give a number above 0", rule="options")
    return tuple(float(cap) for cap in values)


def require_weights(costs: Costs) -> None:
    """Raises CostError for costs that do not say what weights take, beside a limit of all that a rank holds."""
    if not costs.weight_bytes:
        raise CostError(
            "total_limit counts all that a rank holds, and the costs do not say what weights take; give "
            "weight_bytes, or memory_limit, which counts activations alone"
        )


def _check_room(limits: Limits, placement: Placement, name: str, kept: float) -> None:
    for pipeline, hosts in enumerate(placement.pipelines):
        for rank, cap in enumerate(limits.cap):
            mine = [stage for stage, host in enumerate(hosts) if host == rank]
            # When a stage's forward has run again it is held whole, and of those before it what they keep.
            held = [limits.held[stage][0] for stage in mine]
            needed = max((sum(held[:k]) * kept + held[k] for k in range(len(held))), default=0.0)
            if limits.host and is_within(sum(held[:-1]), limits.host[rank]):
                needed = min(needed, max(held, default=0.0))
            if not is_within(needed, cap):
                unit = "activations" if name == "max_in_flight" else "of memory"
                raise ScheduleError(
                    f"rank {rank} holds {needed:g} {unit} for one microbatch (stages "
                    f"{', '.join(map(str, mine))} of pipeline {pipeline}), but {name} is {cap:g}; no schedule fits: "
                    f"raise {name} or place fewer stages there",
                    rule="memory",
                    rank=rank,
                )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
