"""The native JSON of a schedule: versioned and strict.

{"format": "penstock-schedule", "version": 1, "name": "1f1b",
 "placement": [[0, 1]], "microbatch_pipeline": [0, 0], "memory_limit": null,
 "order": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}

What it calls `memory_limit` is the schedule's `max_in_flight`.

Version 2 adds, only where a schedule has them, stages that ranks share and a graph of stages:

 "shared": [[0, [0, 1]]],
 "stage_graph": {"edges": [[0, 1]], "num_microbatches": [], "registered": [["GATHER", 1, 2, [0, 1]]],
                 "needs": [["F", 1, "GATHER", 1, 4, 1]]}

Version 3 adds, only where a schedule has its updates as ops, what they gather and the mismatch that they may make:

 "updates": {"window": 8, "max_mismatch": 1}

Version 4 adds, only where it is not "none", the rule by which ops read weights:

 "updates": {"window": 8, "max_mismatch": 1, "rule": "pipedream-2bw"}

Version 5 tells of registered ops that are asynchronous, only where some are, by one more entry of each:

 "registered": [["GATHER", 1, 2, [0, 1], true]]

Version 6 adds, only where there are some, the orders of microbatches that are not ascending, each of a kind, in a
pipeline, on some stages:

 "microbatch_orders": [["B", 0, [0, 1], [2, 1, 0]]]

Version 7 adds, only where some are, that registered ops hold or give back stage activations, by one entry more; and
kinds whose names have digits:

 "registered": [["OFFLOAD", 1, 2, [], true, -1.0]]

Version 8 adds, only where some are, registered ops of some microbatches alone, by one entry more, and needs that name
their ops, by pairs:

 "registered": [["OFFLOAD", 1, 2, [], true, -1.0, [3, 5]]]
 "needs": [["OFFLOAD", 1, "F", 1, [[3, 7]]]]

Version 9 writes a forward and a backward that a rank runs as one in one place of its row:

 "order": [["0F0", "0F3+3B1"], ["1F0", "1F3+2B1"]]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from penstock.schedule import (
    NEWEST,
    MicrobatchOrder,
    Needs,
    Op,
    Placement,
    Registered,
    Schedule,
    ScheduleError,
    StageGraph,
    Updates,
    parse_op,
)
from penstock.schedule.microbatch_order import grouped, ungrouped
from penstock.schedule.pairs import JOIN, of_steps, paired_steps
from penstock.schedule.text_parser import parse_step

FORMAT, VERSION = "penstock-schedule", 9
MAX_FLOAT = sys.float_info.max


def to_json(schedule: Schedule) -> str:
    """The schedule as native JSON.

    Args:
        schedule: any schedule.

    Examples:
        >>> import penstock as ps
        >>> import json
        >>> json.loads(ps.formats.to_json(ps.build("1f1b", 2, 2)))["name"]
        '1f1b'
    """
    graph = schedule.stage_graph
    version = 5 if schedule.asynchronous else 4
    if graph is not None and (graph.some_of or graph.holds):
        version = 7 if graph.some_of else 6
    value: dict[str, Any] = {
        "format": FORMAT,
        "version": _version(schedule),
        "name": schedule.name,
        "placement": schedule.placement.pipelines,
        "microbatch_pipeline": schedule.microbatch_pipeline,
        "memory_limit": schedule.max_in_flight,
        "order": [[JOIN.join(map(str, step)) for step in row] for row in paired_steps(schedule)],
    }
    if schedule.placement.shared:
        value["shared"] = schedule.placement.shared
    if graph is not None:
        value["stage_graph"] = {
            "edges": graph.edges,
            "num_microbatches": graph.num_microbatches,
            "registered": [
                [r.kind, r.stage, r.num_ops, r.ranks, r.asynchronous, r.holds, r.microbatches][:version]
                for r in graph.registered
            ],
            "needs": [
                [*n.before, *n.after, *([n.pairs] if n.pairs else [n.num_before, n.num_after])] for n in graph.needs
            ],
        }
    if (updates := schedule.updates) is not None:
        value["updates"] = {"window": updates.window, "max_mismatch": updates.max_mismatch}
        if updates.rule != NEWEST:
            value["updates"]["rule"] = updates.rule
    if schedule.microbatch_orders:
        value["microbatch_orders"] = grouped(schedule.microbatch_orders)
    return json.dumps(value)


def _version(schedule: Schedule) -> int:
    """The first version that can say it all, so that older readers read what they can."""
    graph = schedule.stage_graph
    if schedule.pairs:
        return 9
    if graph is not None and (graph.some_of or any(n.pairs for n in graph.needs)):
        return 8
    if graph is not None and (graph.holds or any(re.search("[0-9]", r.kind) for r in graph.registered)):
        return 7
    if schedule.microbatch_orders:
        return 6
    if schedule.asynchronous:
        return 5
    if schedule.updates is not None:
        return 3 if schedule.updates.rule == NEWEST else 4
    return 2 if schedule.stage_graph is not None or schedule.placement.shared else 1


def from_json(text: str) -> Schedule:
    """Reads native JSON; raises ScheduleError that names the field, what it holds and what it should.

    Args:
        text: of a native JSON file.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("zb-v", 2, 4)
        >>> ps.formats.from_json(ps.formats.to_json(s)) == s
        True
    """
    try:
        value = json.loads(text, object_pairs_hook=without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"not JSON: {error}", rule="json") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        why = f'a JSON object with "format": "{FORMAT}" is needed'
        if isinstance(value, dict) and "traceEvents" in value:
            why = "it is a trace, for penstock analyze; of a run, give schedule.txt in the same folder"
        raise ScheduleError(f"not a schedule: {why}", rule="json")
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ScheduleError(f"version is {version!r}: a whole number from 1 is needed", rule="json")
    if version > VERSION:
        raise ScheduleError(f"format version {version} is newer than {VERSION}; upgrade Penstock", rule="json")
    known = {"format", "version", "name", "placement", "microbatch_pipeline", "memory_limit", "order"}
    known |= {"shared", "stage_graph"} if version > 1 else set()
    known |= {"updates"} if version > 2 else set()
    known |= {"microbatch_orders"} if version > 5 else set()
    if unknown := sorted(set(value) - known):
        raise ScheduleError(f"unknown field {unknown[0]!r} in version {version}", rule="json")
    name = _field(value, "name", isinstance(value.get("name"), str), "a string")
    placement = _field(
        value, "placement", _is_table(value.get("placement"), _is_int), "lists of ranks, one a pipeline"
    )
    pipeline_of = _field(
        value,
        "microbatch_pipeline",
        _is_list(value.get("microbatch_pipeline"), _is_int),
        "a list of pipelines",
    )
    rows = _field(value, "order", _is_table(value.get("order"), _is_str), "lists of ops, one per rank")
    limit = value.get("memory_limit")
    if limit is not None:
        _field(value, "memory_limit", _is_number(limit), "a number above 0, or null")
    order, pairs = of_steps(
        [_step(text, rank, step, version) for step, text in enumerate(row)] for rank, row in enumerate(rows)
    )
    return Schedule(
        name,
        Placement(tuple(tuple(ranks) for ranks in placement), _shared(value)),
        order,
        tuple(pipeline_of),
        None if limit is None else float(limit),
        _stage_graph(value, len(placement[0]) if placement else 0, version),
        _updates(value, version),
        _microbatch_orders(value),
        pairs,
    )


def _microbatch_orders(value: dict[str, Any]) -> tuple[MicrobatchOrder, ...]:
    entries = value.get("microbatch_orders", [])
    items = (_is_str, _is_int, _is_ints, _is_ints)
    _field(
        value | {"microbatch_orders": entries},
        "microbatch_orders",
        _is_list(entries, lambda entry: _is_row(entry, items)),
        'lists of a kind, a pipeline, stages and their microbatches in order, like ["B", 0, [0, 1], [2, 1, 0]]',
    )
    return tuple(
        order
        for kind, pipeline, stages, microbatches in entries
        for order in ungrouped(kind, pipeline, stages, tuple(microbatches))
    )


def _updates(value: dict[str, Any], version: int) -> Updates | None:
    updates = value.get("updates")
    if updates is None:
        return None
    known = {"window", "max_mismatch"} | ({"rule"} if version > 3 else set())
    right = (
        isinstance(updates, dict)
        and {"window", "max_mismatch"} <= set(updates) <= known
        and _is_int(updates["window"])
        and (updates["max_mismatch"] is None or _is_int(updates["max_mismatch"]))
        and _is_str(updates.get("rule", NEWEST))
    )
    rule = ", and a rule by name" if version > 3 else ""
    _field(value, "updates", right, f"an object with window, a number, and max_mismatch, a number or null{rule}")
    return Updates(updates["window"], updates["max_mismatch"], updates.get("rule", NEWEST))


def _shared(value: dict[str, Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    entries = value.get("shared", [])
    right = _is_list(entries, lambda e: _is_row(e, (_is_int, _is_ints)))
    _field(value | {"shared": entries}, "shared", right, "lists of a stage and its ranks, like [0, [0, 1]]")
    return tuple((stage, tuple(ranks)) for stage, ranks in entries)


def _stage_graph(value: dict[str, Any], num_stages: int, version: int) -> StageGraph | None:
    graph = value.get("stage_graph")
    if graph is None:
        return None
    num_since = (version > 4) + (version > 6) + (version > 7)
    entry = (_is_str, _is_int, _is_int, _is_ints, _is_bool, _is_amount, _is_ints)[: 4 + num_since]
    since = ", and whether it is asynchronous", ", and what it holds", ", and its microbatches"
    shape = {
        "edges": (lambda e: _is_row(e, (_is_int, _is_int)), "pairs of stages"),
        "num_microbatches": (_is_int, "counts, one per stage, or none"),
        "registered": (
            lambda r: isinstance(r, list) and len(r) >= 4 and _is_row(r, entry[: len(r)]),
            "".join(("lists of a kind, its stage, its number of ops and its ranks", *since[:num_since])),
        ),
        "needs": (
            lambda n: (
                _is_row(n, (_is_str, _is_int, _is_str, _is_int, _is_int, _is_int))
                or (version > 7 and _is_row(n, (_is_str, _is_int, _is_str, _is_int, _is_pairs)) and len(n[4]) > 0)
            ),
            "lists of kind and stage before, kind and stage after, and how many of each"
            + (", or pairs of them" if version > 7 else ""),
        ),
    }
    if not isinstance(graph, dict) or set(graph) != set(shape):
        raise ScheduleError(f"field 'stage_graph': expected an object with {', '.join(shape)}", rule="json")
    for name, (item, expected) in shape.items():
        _field(graph, name, _is_list(graph[name], item), expected)
    return StageGraph(
        num_stages,
        tuple((a, b) for a, b in graph["edges"]),
        tuple(graph["num_microbatches"]),
        tuple(
            Registered(kind, stage, num, tuple(ranks), *more[:2], *map(tuple, more[2:]))
            for kind, stage, num, ranks, *more in graph["registered"]
        ),
        tuple(
            Needs((k, s), (k2, s2), *how)
            if len(how) == 2
            else Needs((k, s), (k2, s2), pairs=tuple((a, b) for a, b in how[0]))
            for k, s, k2, s2, *how in graph["needs"]
        ),
    )


def _field(value: dict[str, Any], name: str, right: bool, expected: str) -> Any:
    if not right:
        got = json.dumps(value[name])[:60] if name in value else "nothing"
        raise ScheduleError(f"field {name!r}: expected {expected}, got {got}", rule="json")
    return value[name]


def _step(text: str, rank: int, step: int, version: int) -> tuple[Op, ...]:
    try:
        return parse_step(text) if version > 8 else (parse_op(text),)
    except ValueError as error:
        raise ScheduleError(f"order, rank {rank}, step {step}: {error}", rule="json") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ints(value: Any) -> bool:
    return _is_list(value, _is_int)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MAX_FLOAT


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_FLOAT


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object for `json.loads`, which would take the last of two. Raises ValueError for a field given twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _is_pairs(value: Any) -> bool:
    return _is_list(value, lambda pair: _is_row(pair, (_is_int, _is_int)))


def _is_row(value: Any, items: tuple[Callable[[Any], bool], ...]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(items)
        and all(item(part) for item, part in zip(items, value, strict=True))
    )


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any, item: Any) -> bool:
    return isinstance(value, list) and all(item(v) for v in value)


def _is_table(value: Any, item: Any) -> bool:
    return isinstance(value, list) and all(_is_list(row, item) for row in value)
