"""Costs from a profile: what `penstock tune --profile-only --out` measured of a model's layers, cut into stages.

layers      embedding  block  block  block  head          f, i, w ... one entry per layer
stages     [          stage 0       ][   stage 1   ]      the costliest stage costs least
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.cost import CostError, Costs
from penstock.cost.cut import PartitionError, partition
from penstock.formats.checked_json import converted

FORMAT, VERSION = "penstock-profile", 2

_STATE = ("weight", "state", "update")
"""Bytes of weights and of what the optimizer keeps for them, and ms of an update."""

Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Row = Annotated[list[Amount], Meta(min_length=1, description="a list with one number of at least 0 per layer")]


class ProfileFields(msgspec.Struct):
    """One profile of a file. Profiles hold more than is read here; files of old have no weight, state and update."""

    num_parallel: Annotated[int, Meta(description="a whole number")]
    b: Row
    f_split: Row
    i: Row
    w: Row
    activation: Row
    held: Row
    output: Row
    weight: Row | None = None
    state: Row | None = None
    update: Row | None = None
    microbatch_size: Any = None
    recompute: bool = False
    op_overhead: dict[str, float] | None = None


def is_profile(value: Any) -> bool:
    """Whether JSON is a profile's, judged by what it is headed with."""
    return isinstance(value, dict) and (value.get("format") == FORMAT or "profiles" in value)


def costs_of_profile(value: Any, num_stages: int) -> Costs:
    """Costs of `num_stages` stages of the profiled model.

    F is that of a stage whose backward is split. Where the profile has them, the bytes of weights and optimizer state
    are there too, and what an update takes on the copy that owns a stage. Of several profiles the one without
    recompute is taken, with as many ranks side by side as there are stages, or the next fewer.

    Raises:
        CostError: another version, profiles of several microbatch sizes, a field that is missing or damaged, more
            stages than layers.
    """
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION:
        raise CostError(f"a profile of version {version!r}: this Penstock reads up to {VERSION}; upgrade it")
    try:
        profile = _chosen(converted(value.get("profiles"), list[ProfileFields]), num_stages)
    except ValueError as error:
        raise CostError(f"profiles: {error}") from None
    rows = {name: row for name in ProfileFields.__struct_fields__ if isinstance(row := getattr(profile, name), list)}
    if len({len(row) for row in rows.values()}) != 1:
        raise CostError(f"the profile's lists have different lengths; each of {', '.join(rows)} has one per layer")
    lacks = [name for name in _STATE if name not in rows]
    if 0 < len(lacks) < len(_STATE):
        raise CostError(f"a profile lacks {lacks[0]}: give {', '.join(_STATE)}, or none of them")
    layers = [f + i + w for f, i, w in zip(profile.f_split, profile.i, profile.w, strict=True)]
    try:
        parts = partition(layers, num_stages)
    except PartitionError as error:
        raise CostError(str(error)) from None
    overhead = profile.op_overhead or {}

    def total(name: str) -> list[float]:
        return [sum(rows[name][layer] for layer in part) + overhead.get(name, 0.0) for part in parts]

    kept, held = sum(profile.activation), sum(profile.held)
    state: dict[str, Any] = {}
    if not lacks:
        state = {"weight_bytes": total("weight"), "optimizer_bytes": total("state"), "update_bytes": total("weight")}
        state["other"] = {("U", stage): ms for stage, ms in enumerate(total("update"))}
    return Costs(
        f=total("f_split"),
        i=total("i"),
        w=total("w"),
        b=total("b"),
        activation=total("activation"),
        freed_by_input=max(0.0, 1 - held / kept) if kept else 0.0,
        message_bytes=[profile.output[part[-1]] for part in parts[:-1]] + [0.0],
        **state,
    )


def _chosen(profiles: list[ProfileFields], num_stages: int) -> ProfileFields:
    if not profiles:
        raise CostError("a list with at least one profile is needed, got []")
    plain = [each for each in profiles if not each.recompute]
    if not plain:
        raise CostError("all profiles in it recompute; profile without --recompute")
    if len(sizes := sorted({str(each.microbatch_size) for each in plain})) > 1:
        raise CostError(f"it has profiles of microbatches of {', '.join(sizes)} samples; profile just one size")
    fitting = [each for each in plain if each.num_parallel <= num_stages]
    return (max if fitting else min)(fitting or plain, key=lambda each: each.num_parallel)
