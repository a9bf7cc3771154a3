"""Schedules as files, and their native JSON, which is versioned and strict.

    ps.save(s, "s.json")     ps.save(s, "s.txt")     ps.save(s, "s.csv")     ps.load("s.csv", dialect="torch")

The ending decides the format; for torch's CSV, a dialect decides the form. The native JSON:

{"format": "penstock-schedule", "version": 1, "name": "1f1b",
 "placement": [[0, 1]], "microbatch_pipeline": [0, 0], "memory_limit": null,
 "order": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}

What it calls `memory_limit` is the schedule's `max_in_flight`. A forward and a backward that a rank runs as one are
in one place of its row, "0F3+3B1". Only where a schedule has them, there are:

 "shared": [[0, [0, 1]]]                                                          stages that ranks share
 "stage_graph": {"edges": [[0, 1]], "num_microbatches": [],
     "registered": [["OFFLOAD", 1, 2, [], true, -1.0, [3, 5]]],                   kind, stage, ... of `Registered`
     "needs": [["F", 1, "GATHER", 1, 4, 1, []], ["OFFLOAD", 1, "F", 1, 1, 1, [[3, 7]]]]}
 "updates": {"window": 8, "max_mismatch": 1, "rule": "pipedream-2bw"}             updates as ops
 "microbatch_orders": [["B", 0, [0, 1], [2, 1, 0]]]                               kind, pipeline, stages, order
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import astuple, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from penstock.formats.files import converted, path_of, read_json, write_whole
from penstock.formats.torch_csv import CsvForm, from_torch_csv, in_form, to_torch_csv
from penstock.schedule import (
    NEWEST,
    Needs,
    Op,
    Placement,
    Registered,
    Schedule,
    ScheduleError,
    StageGraph,
    Updates,
    declare_shown_order,
    parse,
    to_text,
)
from penstock.schedule.messages import NCCL
from penstock.schedule.microbatch_order import grouped, ungrouped
from penstock.schedule.pairs import JOIN, of_steps, paired_steps
from penstock.schedule.schedule import require_schedule
from penstock.schedule.text_parser import parse_step

FORMAT, VERSION = "penstock-schedule", 1

Ints = tuple[int, ...]
Limit = Annotated[int, Meta(gt=0, le=sys.maxsize)] | Annotated[float, Meta(gt=0, le=sys.float_info.max)] | None
"""A whole number stays one, so that what is read is written as it was."""
Amount = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


Registration = tuple[str, int, int, Ints, bool, Amount, Ints]
Need = tuple[str, int, str, int, int, int, tuple[tuple[int, int], ...]]

_REGISTERED = f"lists of {', '.join(each.name for each in fields(Registered))}"
_NEEDS = "lists of kind and stage before, kind and stage after, num_before, num_after, and pairs of ops or none"
_ORDERS = 'lists of a kind, a pipeline, stages and their microbatches in order, like ["B", 0, [0, 1], [2, 1, 0]]'


class StageGraphFields(msgspec.Struct, forbid_unknown_fields=True):
    edges: Annotated[tuple[tuple[int, int], ...], Meta(description="pairs of stages")]
    num_microbatches: Annotated[Ints, Meta(description="counts, one per stage, or none")]
    registered: Annotated[tuple[Registration, ...], Meta(description=_REGISTERED)]
    needs: Annotated[tuple[Need, ...], Meta(description=_NEEDS)]


class UpdatesFields(msgspec.Struct, forbid_unknown_fields=True):
    window: Annotated[int, Meta(description="a number of microbatches")]
    max_mismatch: Annotated[int | None, Meta(description="a number, or null")]
    rule: Annotated[str, Meta(description="a rule by name")] = NEWEST


class ScheduleFile(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(description="a string")]
    placement: Annotated[tuple[Ints, ...], Meta(description="lists of ranks, one a pipeline")]
    microbatch_pipeline: Annotated[Ints, Meta(description="a list of pipelines")]
    order: Annotated[tuple[tuple[str, ...], ...], Meta(description="lists of ops, one per rank")]
    memory_limit: Annotated[Limit, Meta(description="a number above 0, or null")] = None
    shared: Annotated[tuple[tuple[int, Ints], ...], Meta(description="lists of a stage and its ranks")] = ()
    stage_graph: StageGraphFields | None = None
    updates: UpdatesFields | None = None
    microbatch_orders: Annotated[tuple[tuple[str, int, Ints, Ints], ...], Meta(description=_ORDERS)] = ()


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
    graph, updates = schedule.stage_graph, schedule.updates
    more: dict[str, Any] = {"shared": schedule.placement.shared}
    if graph is not None:
        registered = (astuple(each) for each in graph.registered)
        needs = ((*n.before, *n.after, n.num_before, n.num_after, n.pairs) for n in graph.needs)
        more["stage_graph"] = StageGraphFields(graph.edges, graph.num_microbatches, tuple(registered), tuple(needs))
    if updates is not None:
        more["updates"] = UpdatesFields(updates.window, updates.max_mismatch, updates.rule)
    more["microbatch_orders"] = grouped(schedule.microbatch_orders)
    value = {
        "format": FORMAT,
        "version": VERSION,
        "name": schedule.name,
        "placement": schedule.placement.pipelines,
        "microbatch_pipeline": schedule.microbatch_pipeline,
        "memory_limit": schedule.max_in_flight,
        "order": [[JOIN.join(map(str, step)) for step in row] for row in paired_steps(schedule)],
    }
    return json.dumps(value | {name: msgspec.to_builtins(each) for name, each in more.items() if each})


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
        file = converted(_body(read_json(text)), ScheduleFile)
    except ValueError as error:
        raise ScheduleError(str(error), rule="json") from None
    order, pairs = of_steps(
        [_step(text, rank, step) for step, text in enumerate(row)] for rank, row in enumerate(file.order)
    )
    graph, updates = file.stage_graph, file.updates
    return Schedule(
        file.name,
        Placement(file.placement, file.shared),
        order,
        file.microbatch_pipeline,
        file.memory_limit,
        None if graph is None else _stage_graph(graph, len(file.placement[0]) if file.placement else 0),
        None if updates is None else Updates(updates.window, updates.max_mismatch, updates.rule),
        tuple(each for entry in file.microbatch_orders for each in ungrouped(*entry)),
        pairs,
    )


def _body(value: Any) -> dict[str, Any]:
    """The file without its format and version, which must be ours."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        why = f'a JSON object with "format": "{FORMAT}" is needed'
        if isinstance(value, dict) and "traceEvents" in value:
            why = "it is a trace, for penstock analyze; of a run, give schedule.txt in the same folder"
        raise ValueError(f"not a schedule: {why}")
    version = value.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(
            f"version is {version!r}: this Penstock reads and writes version {VERSION}; upgrade Penstock, or "
            "write the schedule as .txt with the Penstock that wrote this file"
        )
    return {name: field for name, field in value.items() if name not in ("format", "version")}


def _stage_graph(graph: StageGraphFields, num_stages: int) -> StageGraph:
    needs = (Needs((k, s), (k2, s2), n, m, pairs) for k, s, k2, s2, n, m, pairs in graph.needs)
    registered = (Registered(*each) for each in graph.registered)
    return StageGraph(num_stages, graph.edges, graph.num_microbatches, tuple(registered), tuple(needs))


def _step(text: str, rank: int, step: int) -> tuple[Op, ...]:
    try:
        return parse_step(text)
    except ValueError as error:
        raise ScheduleError(f"order, rank {rank}, step {step}: {error}", rule="json") from None


DIALECTS: dict[str, CsvForm | None] = {"torch": None, **{f"torch:{form}": form for form in get_args(CsvForm)}}
"""The dialects of `.csv`: torch's CSV as the schedule is, without messages as ops, or with them."""

ENDINGS = (".json", ".txt", ".csv")


def save(schedule: Schedule, path: str | Path, dialect: str | None = None, channels: str = NCCL) -> None:
    """Writes a schedule to a file. The ending decides the format.

    Args:
        schedule: the schedule to write.
        path: a path that ends with `.json` (native JSON), `.txt` (the text grid) or `.csv` (torch's CSV).
        dialect: the form of a `.csv`. "torch" (the default) writes the ops as they are, "torch:compute_only" leaves
            communication ops out, "torch:compute_comms" adds them if the schedule has none, and
            "torch:compute_comms_waits" also has the waits that torch 2.15 and newer ask for.
        channels: what will carry the messages of a `.csv` in torch: "nccl", "gloo", "nccl-pair" or "nccl-edge".
            Messages are placed for it where the schedule has none, and proved for it.

    Raises:
        ScheduleError: another ending or dialect, or a file that can't be written. For `.csv` also a schedule that is
            not valid, or that needs what torch lacks.

    Examples:
        >>> import tempfile, penstock as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ps.save(ps.build("1f1b", 2, 4), f"{folder}/mine.txt")
        ...     print(ps.load(f"{folder}/mine.txt") == ps.build("1f1b", 2, 4))
        True
    """
    path = path_of(path)
    _check_ending(path, dialect, "written as")
    require_schedule(schedule)
    if path.suffix == ".csv":
        text = to_torch_csv(schedule, DIALECTS[dialect or "torch"], channels)
    else:
        text = to_json(schedule) if path.suffix == ".json" else to_text(schedule) + "\n"
    write_whole(path, text)


def load(path: str | Path, dialect: str | None = None, declare_order: bool = False) -> Schedule:
    """Reads a schedule that `save` wrote. It does not prove the schedule; `ps.check` does.

    Args:
        path: a path that ends with `.json`, `.txt` or `.csv`.
        declare_order: whether the schedule declares the order of microbatches that its rows show, if that is not the
            ascending one that `check` expects. A CSV can't declare it. Gradients are then summed in the rows' order.
        dialect: the form of a `.csv`. "torch" (the default) keeps its communication ops, "torch:compute_only" leaves
            them out, and "torch:compute_comms" adds them if there are none, like "torch:compute_comms_waits". A CSV
            holds no name, so the schedule gets the file's.

    Raises:
        ScheduleError: another ending or dialect, or a file that can't be read. The error names the file and what is
            wrong in it.

    Examples:
        >>> import tempfile, penstock as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ps.save(ps.build("zb-v", 4, 8), f"{folder}/zb-v.csv", dialect="torch:compute_only")
        ...     print(ps.load(f"{folder}/zb-v.csv").name)
        zb-v
    """
    path = path_of(path)
    _check_ending(path, dialect, "read from")
    try:
        return _read(path, dialect, declare_order)
    except OSError as error:
        raise ScheduleError(f"{path}: {error.strerror or error}", rule="file") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: not text", rule="file") from None
    except ScheduleError as error:
        raise error.in_file(path) from None


def _read(path: Path, dialect: str | None, declare_order: bool) -> Schedule:
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".csv":
        found = from_torch_csv(text, name=_name_of(path))
    else:
        found = from_json(text) if path.suffix == ".json" else parse(text)
    if declare_order:
        found = declare_shown_order(found)
    return in_form(found, DIALECTS[dialect or "torch"]) if path.suffix == ".csv" else found


def _check_ending(path: Path, dialect: str | None, done: str) -> None:
    if path.suffix not in ENDINGS:
        raise ScheduleError(f"{path}: schedules are {done} .json, .txt or .csv, not {path.suffix!r}", rule="file")
    if dialect is None:
        return
    if not isinstance(dialect, str) or dialect not in DIALECTS:
        raise ScheduleError(f"no dialect {dialect!r}; there are {', '.join(DIALECTS)}", rule="options")
    if path.suffix != ".csv":
        raise ScheduleError(f"{path}: dialect {dialect!r} is for .csv files; leave it out", rule="options")


def _name_of(path: Path) -> str:
    """A name for a schedule, made from the file's name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", path.stem).lstrip("._+-") or "torch"
