"""How much each rank may hold while it plans: in stage activations, in bytes, or without limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from penstock.cost import CostError, Costs
from penstock.engine.tolerance import is_within
from penstock.schedule import Placement, ScheduleError

MOST_AGAIN = 6
"""Times that a search begins again with less room, where messages take more than a limit of bytes leaves."""


@dataclass(frozen=True)
class Limits:
    """Caps per rank, and what a forward of each stage holds in their unit, with the share of it that I frees.

    `host` caps what of a rank is in host memory; empty where nothing goes there.
    """

    cap: tuple[float, ...]
    held: tuple[tuple[float, float], ...]
    in_flight: float | None = None
    host: tuple[float, ...] = ()


def limits_of(
    costs: Costs,
    placement: Placement | None,
    num_ranks: int,
    max_in_flight: float | Sequence[float] | None,
    memory_limit: float | Sequence[float] | None,
    split: bool,
    kept: float = 1.0,
    offload: bool | float | Sequence[float] | None = None,
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
    share = costs.freed_by_input if split else 0.0
    host: tuple[float, ...] = ()
    if offload is True:
        host = (math.inf,) * num_ranks
    elif offload is not None and offload is not False:
        host = per_rank("offload", offload, num_ranks)
    if max_in_flight is None:
        held = tuple((float(a), float(share)) for a in costs.activation)
        if memory_limit is None:
            return Limits((math.inf,) * num_ranks, held, host=host)
        cap = per_rank("memory_limit", memory_limit, num_ranks)
        limits = Limits(cap, held, host=host)
    else:
        cap = per_rank("max_in_flight", max_in_flight, num_ranks)
        in_flight = max(cap) if min(cap) == max(cap) < math.inf else None
        limits = Limits(cap, ((1.0, 0.0),) * costs.num_stages, in_flight, host)
    if placement is None:
        return limits
    _check_room(limits, placement, "max_in_flight" if memory_limit is None else "memory_limit", kept)
    return limits


def require_one_limit(**limits: object) -> None:
    """Raises ScheduleError where more than one limit of memory is given, each by the name of its option."""
    given = [f"{name} {value}" for name, value in limits.items() if value is not None]
    if len(given) > 1:
        raise ScheduleError(f"{' and '.join(given[:2])} both limit memory; give one of them", rule="options")


def per_rank(name: str, value: float | Sequence[float], num_ranks: int) -> tuple[float, ...]:
    """A limit of each rank. Raises ScheduleError for another number of them, or one that is not above 0."""
    values = [value] * num_ranks if isinstance(value, Real) else list(value)  # type: ignore[arg-type]
    if len(values) != num_ranks:
        raise ScheduleError(
            f"{name} has {len(values)} entries; give one number, or one per rank: {num_ranks}", rule="options"
        )
    for rank, cap in enumerate(values):
        if not isinstance(cap, Real) or isinstance(cap, bool) or not float(cap) > 0:
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
