"""Options of a pipeline by their own names, packed into the option values that `ps.Pipeline` takes.

Tests go over single options, whose names are shorter in tables of them.
"""

from __future__ import annotations

from typing import Any

import penstock as ps

PRECISION = ("autocast", "clip_norm")
PARALLEL = ("sharding", "parallelize", "device", "costs", "tied")
TRANSPORT = ("depth", "links", "delegates")


def packed(**options: Any) -> dict[str, Any]:
    """`packed(clip_norm=1.0, seed=3)` is `{"precision": PrecisionOptions(clip_norm=1.0), "seed": 3}`.

    `zero=False` lets every copy of a stage have the optimizer's state, and `steering` is `adapt`.
    """
    if "steering" in options:
        options["adapt"] = options.pop("steering")
    if not options.pop("zero", True) and options.get("sharding", "none") == "none":
        options["sharding"] = "none"
    if precision := _taken(options, PRECISION):
        options["precision"] = ps.PrecisionOptions(**precision)
    if parallel := _taken(options, PARALLEL):
        options["parallel"] = ps.ParallelOptions(**parallel)
    if transport := _taken(options, TRANSPORT):
        options["transport"] = ps.TransportOptions(options.pop("transport", "host"), **transport)
    return options


def _taken(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}
