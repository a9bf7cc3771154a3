"""Costs from a profile: what `penstock tune --profile-only --out` measured of a model's layers, cut into stages.

layers      embedding  block  block  block  head          f, i, w ... one entry per layer
stages     [          stage 0       ][   stage 1   ]      the costliest stage costs least
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.cost import CostError, Costs
from penstock.cost.cut import PartitionError, partition

FORMAT, VERSION = "penstock-profile", 2

_ROWS = ("b", "f_split", "i", "w", "activation", "held", "output")
_STATE = ("weight", "state", "update")
"""Bytes of weights and of what the optimizer keeps for them, and ms of an update; files of old may have none."""


def is_profile(value: Any) -> bool:
    """Whether JSON is a profile's, judged by what it is headed with."""
    return isinstance(value, dict) and (value.get("format") == FORMAT or "profiles" in value)


def costs_of_profile(value: Mapping[str, Any], num_stages: int) -> Costs:
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
        raise CostError(f"a profile of version {version!r}: this Penstock reads up to {VERSION}")
    profile = _chosen(value.get("profiles"), num_stages)
    has_state = any(name in profile for name in _STATE)
    rows = {name: _row(profile, name) for name in (*_ROWS, *(_STATE if has_state else ()))}
    if len({len(row) for row in rows.values()}) != 1:
        raise CostError(f"the profile's lists have different lengths; each of {', '.join(rows)} has one per layer")
    layers = [f + i + w for f, i, w in zip(rows["f_split"], rows["i"], rows["w"], strict=True)]
    try:
        parts = partition(layers, num_stages)
    except PartitionError as error:
        raise CostError(str(error)) from None
    overhead = profile.get("op_overhead") or {}

    def total(name: str) -> list[float]:
        more = overhead.get(name, 0.0) if isinstance(overhead, dict) else 0.0
        return [sum(rows[name][layer] for layer in part) + more for part in parts]

    kept, held = sum(rows["activation"]), sum(rows["held"])
    state: dict[str, Any] = {}
    if has_state:
        state = {"weight_bytes": total("weight"), "optimizer_bytes": total("state"), "update_bytes": total("weight")}
        state["other"] = {("U", stage): ms for stage, ms in enumerate(total("update"))}
    return Costs(
        f=total("f_split"),
        i=total("i"),
        w=total("w"),
        b=total("b"),
        activation=total("activation"),
        freed_by_input=max(0.0, 1 - held / kept) if kept else 0.0,
        message_bytes=[rows["output"][part[-1]] for part in parts[:-1]] + [0.0],
        **state,
    )


def _chosen(profiles: Any, num_stages: int) -> Mapping[str, Any]:
    if not isinstance(profiles, list) or not profiles or not all(isinstance(each, dict) for each in profiles):
        raise CostError("profiles are a list with at least one object")
    plain = [each for each in profiles if not each.get("recompute")]
    if not plain:
        raise CostError("all profiles in it recompute; profile without --recompute")
    if len(sizes := sorted({str(each.get("microbatch_size")) for each in plain})) > 1:
        raise CostError(f"it has profiles of microbatches of {', '.join(sizes)} samples; profile just one size")
    side_by_side = [(_whole(each, "num_parallel"), each) for each in plain]
    fitting = [pair for pair in side_by_side if pair[0] <= num_stages]
    return (max if fitting else min)(fitting or side_by_side, key=lambda pair: pair[0])[1]


def _whole(profile: Mapping[str, Any], name: str) -> int:
    value = profile.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CostError(f"a profile's {name} is {value!r}: give a whole number")
    return value


def _row(profile: Mapping[str, Any], name: str) -> Sequence[float]:
    row = profile.get(name)
    if not isinstance(row, list) or not row:
        raise CostError(f"a profile's {name} is {row!r}: give a list with one number per layer")
    for value in row:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise CostError(f"a profile's {name} has {value!r} in it: give numbers of at least 0")
    return row
