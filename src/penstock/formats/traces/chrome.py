"""Chrome's trace format, as torch's profiler (Kineto) and Penstock write it: one file per rank, or one for all.

An event counts where a pattern matches its name (`run_trace.Names`). Of annotations that are there twice, on the
CPU's track and on the GPU's, the GPU's count: work is queued on the CPU long before it runs. `ProfilerStep#12` says
where a step begins and ends.

A range of torch's schedules also holds the wait for its op's message, so the op inside it is looked for:

    |-- Forward 1 -----------------|            the range of GPipe
    |-- gloo:recv ---|             .            ends when the wait for the message ends
                     |== F1 =======|= loss =|   the op, and on the last stage the loss, which GPipe computes after it

If a profile shows no receives, `analyze.step_table` lets an op begin when its message was sent.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from penstock.formats.native import FORMAT
from penstock.formats.traces.run_trace import (
    NONE,
    PRESETS,
    NamedOp,
    Names,
    Pattern,
    RunTrace,
    Scope,
    TracedOp,
    TraceError,
    kind_named,
    kinds_named,
    preset_for,
    trace_of,
)

CPU, GPU = "user_annotation", "gpu_user_annotation"
RECEIVE, SEND = re.compile(r"\w+:i?recv.*"), re.compile(r"\w+::?i?send.*")
"""Names that torch gives messages: gloo:recv, nccl:send 0->1; and its call c10d::send, which begins before these."""
_PAIR = re.compile(r"PP:\((.+);(.+)\)OVERLAP_F_B")
_BACKWARD = "autograd::engine::evaluate_function"
FORWARDS_SHARE = 1 / 3
"""Of a range that holds a forward and a backward, where nothing recorded says when the backward begins."""
NAME_OPS = (
    'run forwards under `with torch.profiler.record_function(f"Forward {m}"):` and backwards under `with '
    'torch.profiler.record_function(f"Backward {m}"):`, where m is the microbatch; where a process has several '
    'stages, f"PP:{stage}F{m}" and f"PP:{stage}B{m}"'
)
"""How to record a profile that names its ops."""


class ProfileEvent(NamedTuple):
    """One event of a profile. Times in milliseconds.

    Attributes:
        worker: the number of its process among all of the job.
        is_guessed: whether it is the backward of a pair, and nothing recorded says when it began.
    """

    name: str
    worker: int
    start: float
    end: float
    category: str
    args: dict[str, Any]
    track: tuple[Any, Any] = (None, None)
    is_guessed: bool = False


Recorded = defaultdict[str, list[float]]
"""When what happened in a process besides its ops, each in order: waits for messages ended (`received`), messages
were `sent`, messages of both kinds were `begun`, torch's operators ended (`computed`), autograd's functions began
(`backward`)."""


def pairs_divided(events: Sequence[ProfileEvent]) -> list[ProfileEvent]:
    """The events, with a range of a forward and a backward (DualPipeV's `PP:(0F3;3B1)OVERLAP_F_B`) as two of them."""
    if not any(_PAIR.fullmatch(name) for name in {event.name for event in events}):
        return list(events)
    recorded = _recorded(events)
    found = []
    for event in events:
        pair = _PAIR.fullmatch(event.name)
        if pair is None:
            found.append(event)
            continue
        end = begin = guess = event.start + FORWARDS_SHARE * (event.end - event.start)
        if event.category == CPU:
            process = recorded[event.worker]
            waits = _within(process["received"], event)
            if len(waits) > 1:  # the second is the backward's; the forward ended with the operator before
                begin = waits[-1]
                end = max([each for each in _within(process["computed"], event) if each <= begin], default=begin)
            elif backward := _within(process["backward"], event):
                end = begin = backward[0]
        found.append(event._replace(name=f"PP:{pair[1]}", end=end))
        found.append(event._replace(name=f"PP:{pair[2]}", start=begin, is_guessed=begin == guess))
    return found


def ops_inside(matched: Sequence[ProfileEvent], events: Sequence[ProfileEvent], reader: Names) -> list[ProfileEvent]:
    """The ops of ranges: without the wait for their message, with the loss, and each once.

    Args:
        matched: the events that `reader` knows. Those of a GPU hold no waits.
        events: all that was recorded.
    """
    recorded = _recorded(events)
    by_worker: defaultdict[int, list[ProfileEvent]] = defaultdict(list)
    found = []
    for event in matched:
        if _kind(reader, event):
            by_worker[event.worker].append(event)
        else:
            found.append(event)
    for worker, ranges in by_worker.items():
        begins = sorted(event.start for event in ranges)
        for event in _each_once(ranges, reader):
            if event.category != GPU:
                loss_follows = _kind(reader, event) == "F" and not event.name.startswith("PP:")
                event = _without_waits(event, recorded[worker], begins, loss_follows)
            found.append(event)
    return found


def _without_waits(event: ProfileEvent, process: Recorded, begins: list[float], loss_follows: bool) -> ProfileEvent:
    """From the end of its wait for a message until it sends one.

    Args:
        begins: of its process's ranges.
        loss_follows: if it sends none, and so is of the last stage. torch computes the loss after a range of a
            schedule of one stage, and inside those of others.
    """
    start = max(_within(process["received"], event), default=event.start)
    done = max(_within(process["computed"], event), default=event.start)
    end = min((each for each in _within(process["sent"], event) if each >= done), default=event.end)
    following = begins[bisect_left(begins, end) :][:1]
    if loss_follows and process["received"] and following:
        gap = event._replace(start=end, end=following[0])
        if not _within(process["begun"], gap) and not _within(process["sent"], gap._replace(start=event.start)):
            end = following[0]
    return event._replace(start=start, end=end)


def _kind(reader: Names, event: ProfileEvent) -> str:
    """Penstock's letter of an op of a microbatch; empty for other events."""
    found = reader.read(event.name, event.args)
    return found[0].kind if found is not None and found[0].scope is Scope.COMPUTE else ""


def _recorded(events: Sequence[ProfileEvent]) -> defaultdict[int, Recorded]:
    found: defaultdict[int, Recorded] = defaultdict(lambda: defaultdict(list))
    for event in events:
        process = found[event.worker]
        is_sent = SEND.fullmatch(event.name) is not None
        if is_sent or RECEIVE.fullmatch(event.name):
            process["begun"].append(event.start)
            process["sent" if is_sent else "received"].append(event.start if is_sent else event.end)
        elif event.name.startswith(_BACKWARD):
            process["backward"].append(event.start)
        elif event.category == "cpu_op" and not event.name.startswith("c10d::"):
            process["computed"].append(event.end)
    for process in found.values():
        for column in process.values():
            column.sort()
    return found


def _within(moments: list[float], event: ProfileEvent) -> list[float]:
    return moments[bisect_right(moments, event.start) : bisect_left(moments, event.end)]


def _each_once(ranges: Sequence[ProfileEvent], reader: Names) -> list[ProfileEvent]:
    """Ranges without those inside another. A backward with both of its halves inside gives way to them."""
    outer: list[tuple[ProfileEvent, list[ProfileEvent]]] = []
    for event in sorted(ranges, key=lambda each: (each.start, -each.end)):
        if outer and event.start < event.end <= outer[-1][0].end:
            outer[-1][1].append(event)
        else:
            outer.append((event, []))
    found = []
    for event, inside in outer:
        halves = [each for each in inside if _kind(reader, each) in ("I", "W")]
        is_halved = _kind(reader, event) == "B" and len({_kind(reader, each) for each in halves}) == 2
        found += halves if is_halved else [event]
    return found


_INTERLEAVED = "forward_backward_pipelining_with_interleaving"
_STEP = re.compile(r"ProfilerStep#(\d+)")
_PIPELINE = re.compile(r"(?:^|[^a-z])(?:pp|pipe[a-z]*)(?:$|[^a-z])", re.IGNORECASE)
"""In the description of a process group: mesh_pp, PIPELINE_MODEL_PARALLEL_GROUP."""
_RANK = re.compile(r"rank[-_ ]?(\d+)", re.IGNORECASE)


def read_chrome(
    paths: Sequence[Path],
    *,
    name: str,
    patterns: Sequence[Pattern] = (),
    preset: str | None = None,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
) -> RunTrace:
    """Reads a job's files.

    Args:
        paths: one per rank, or one for all.
        patterns: of names; or `preset`, one of `PRESETS`. If neither is given, the preset that fits.
        num_ranks: of a pipeline, where names do not say stages. Pipelines are then process groups of as many, where
            the files list them. Otherwise consecutive processes are replicas of one rank, as in Megatron; or one
            pipeline, if only so no message arrives before it was sent. All are one pipeline where it is not given.
        num_microbatches: of a step, where neither names nor steps say it.

    Raises:
        TraceError: no such format; names that no pattern matches, or whose times are of the CPU where kernels ran on
            a GPU; or two jobs.
    """
    events, said = [], []
    for path, number in zip(paths, _numbers(paths)):
        found, info = _events(path, number)
        events += found
        said.append((path, {each.worker for each in found}, info))
    _require_one_job(said)
    events = pairs_divided(events)
    names = {event.name for event in events}
    if not patterns:
        preset = preset or preset_for(names)
        if preset is None:
            raise _nameless(name, events)
        if preset not in PRESETS:
            raise TraceError(f"preset {preset!r}: there are {', '.join(PRESETS)}")
        if preset == "megatron" and any(each.endswith(_INTERLEAVED) for each in names):
            raise TraceError(
                f"{name}: {_INTERLEAVED} ran, so ranks have several chunks of the model, and names like forward_step "
                f"do not say of which chunk they are: {NAME_OPS}; or give a --pattern with a group named stage"
            )
        patterns = PRESETS[preset]
    elif preset:
        raise TraceError(f"{name}: --framework {preset} and --pattern both say what names mean; give one of them")
    reader = Names(patterns)
    matched = [event for event in events if reader.matches(event.name)]
    if not matched:
        raise TraceError(f"{name}: no name of {len(names)} matches; names are like {sorted(names)[:3]}")
    of_messages = _message_tracks(events)
    on_gpu = [event for event in matched if event.category == GPU and (event.worker, event.track) not in of_messages]
    notes = [f"read by the preset {preset}"] if preset else []
    kernels = [event for event in events if event.category == "kernel" and not event.name.startswith("nccl")]
    if kernels and not any(_kind(reader, event) for event in on_gpu):
        raise TraceError(
            f"{name}: kernels ran on a GPU, but names like {matched[0].name!r} have times of the CPU alone, which "
            f"only queues kernels. Record annotations, whose times on the GPU are recorded too: {NAME_OPS}"
        )
    if on_gpu:
        matched = on_gpu
        notes.append("times are those of the GPU's annotations")
    steps = _steps(events, bool(on_gpu))
    matched = ops_inside(matched, events, reader)
    if guessed := sum(event.is_guessed for event in matched):
        notes.append(
            f"pairs of a forward and a backward of which nothing recorded says where they divide: {guessed}; the "
            f"forward is taken to be {FORWARDS_SHARE:.0%} of each"
        )
    computing = {event.worker for event in matched if _kind(reader, event)}
    layouts = [_pipelines(said, computing, name, num_ranks)]
    if num_ranks and not layouts[0]:
        workers = sorted({event.worker for event in matched})
        layouts.append([tuple(workers[at : at + num_ranks]) for at in range(0, len(workers), num_ranks)])
    said_sizes = [_float(path, "world_size in distributedInfo", info.get("world_size")) for path, _, info in said]
    if (absent := int(max(said_sizes)) - len({event.worker for event in events})) > 0:
        notes.append(f"{absent} of the job's {int(max(said_sizes))} processes have no file here and are left out")
    read = [_located(matched, reader, steps, each, num_ranks, num_microbatches, name, notes) for each in layouts]
    rows = next((each for each in read if not _too_early(each)), read[0])
    if rows is not read[0]:
        notes.append("consecutive processes are taken as a pipeline, as only so no message is early")
    return trace_of(name, rows, notes)


def _nameless(name: str, events: Sequence[ProfileEvent]) -> TraceError:
    """What to add to the recording of a profile in which no known names are."""
    annotations = [event for event in events if event.category in (CPU, GPU) and not _STEP.match(event.name)]
    counted = Counter(event.name for event in annotations or events)
    shown = ", ".join(repr(each) for each, _ in counted.most_common(5))
    there = {kind for preset in PRESETS for kind in kinds_named(set(counted), preset)} - {""}
    lacks = "forwards and backwards" if not there else "backwards" if "F" in there else "forwards"
    return TraceError(
        f"{name}: no names of {lacks} that torch, Megatron, TorchTitan, DeepSpeed or Penstock give; there are "
        f"{shown or 'no events at all'}. A run of ps.Pipeline has a trace of its own: "
        'pipe.timeline().save("run.json"). torch\'s Schedule1F1B gives its ops no names: on CPUs record with '
        "torch.profiler.profile(..., with_stack=True), which names the functions that run them. "
        f"Or name each op: {NAME_OPS}. For other names say by --pattern what they mean"
    )


def _message_tracks(events: Iterable[ProfileEvent]) -> set[tuple[int, Any]]:
    """The streams of GPUs, as worker and track, that run only NCCL's kernels: ranges are annotated there too."""
    kernels = {(event.worker, event.track, event.name[:4]) for event in events if event.category == "kernel"}
    return {key[:2] for key in kernels} - {key[:2] for key in kernels if key[2] != "nccl"}


def _numbers(paths: Sequence[Path]) -> list[int | None]:
    """The number at the end of each file's name, where these count from 0: of files that say no rank."""
    found = [re.findall(r"\d+", path.name.partition(".json")[0])[-1:] for path in paths]
    numbers = [int(each[0]) for each in found if each]
    return [*numbers] if sorted(numbers) == list(range(len(paths))) else [None] * len(paths)


def _events(path: Path, number: int | None) -> tuple[list[ProfileEvent], dict[str, Any]]:
    """Complete events of a file, in milliseconds, and what it says of its job."""
    value = _json(path)
    value = {"traceEvents": value} if isinstance(value, list) else value
    events = value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(events, list):
        why = "Chrome's format has a list named traceEvents"
        if isinstance(value, dict) and value.get("format") == FORMAT:
            why = f"it is a schedule; penstock simulate {path.name} --timeline trace.json makes a trace of it"
        raise TraceError(f"{path.name} is no trace: {why}")
    info = value["distributedInfo"] if isinstance(value.get("distributedInfo"), dict) else {}
    base = _float(path, "baseTimeNanoseconds", value.get("baseTimeNanoseconds")) / 1e6
    events = [event for event in events if isinstance(event, dict) and _names_track(event)]
    worker_of = _workers(path, events, info, number)
    found = []
    for event in events:
        if event.get("ph") != "X":
            continue
        try:
            begin = base + float(event["ts"]) / 1e3
            end = begin + float(event["dur"]) / 1e3
        except (KeyError, TypeError, ValueError):
            continue
        track, category = (event.get("pid"), event.get("tid")), str(event.get("cat", ""))
        worker = worker_of.get(event.get("pid"))
        if worker is None or category == "message":
            continue
        args = event["args"] if isinstance(event.get("args"), dict) else {}
        found.append(ProfileEvent(str(event.get("name", "")), worker, begin, end, category, args, track))
    return found, info


def _names_track(event: dict[str, Any]) -> bool:
    """Whether it says where it happened, in a form that can: processes and threads are numbers or names."""
    return all(isinstance(event.get(name), int | float | str | None) for name in ("pid", "tid", "ph"))


def _float(path: Path, what: str, value: Any) -> float:
    try:
        return float(value or 0.0)
    except (TypeError, ValueError):
        raise TraceError(f"{path.name}: {what} is {value!r}: give a number") from None


def _json(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path.name} is no JSON: {error}") from None
    except RecursionError:
        raise TraceError(f"{path.name} is no trace: its lists lie too deep in one another") from None


def _workers(
    path: Path, events: Sequence[dict[str, Any]], info: dict[str, Any], number: int | None
) -> dict[Any, int]:
    """The number of the process that each pid of a file is. A file of one rank has it in its head or its name."""
    names = {
        event.get("pid"): str(event["args"].get("name", ""))
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name" and isinstance(event.get("args"), dict)
    }
    if any("measured" in name for name in names.values()):  # of a Penstock trace that holds a simulated run too
        names = {pid: name for pid, name in names.items() if "measured" in name}
    ranked = {pid: int(found[1]) for pid, name in names.items() if (found := _RANK.search(name))}
    if ranked:
        return ranked
    pids = {event.get("pid") for event in events}
    rank = info.get("rank")
    if rank is None and (in_name := _RANK.findall(path.name)):
        rank = int(in_name[-1])
    rank = number if rank is None else rank
    return dict.fromkeys(pids, int(_float(path, "the rank in distributedInfo", rank)))


def _require_one_job(said: Sequence[tuple[Path, set[int], dict[str, Any]]]) -> None:
    seen: dict[int, Path] = {}
    for path, workers, _ in said:
        for worker in sorted(workers):
            if worker in seen:
                raise TraceError(
                    f"{seen[worker].name} and {path.name} are both of rank {worker}: are they of two jobs, or two "
                    "recordings of one? Give the files of one; where names have no rank, call them like rank3.json"
                )
            seen[worker] = path
    sizes = {
        int(_float(path, "world_size in distributedInfo", info["world_size"]))
        for path, _, info in said
        if "world_size" in info
    }
    if len(sizes) > 1:
        raise TraceError(
            f"the files say that there were {', '.join(map(str, sorted(sizes)))} processes: they are of two jobs; "
            "give those of one"
        )


def _pipelines(
    said: Sequence[tuple[Path, set[int], dict[str, Any]]], given: set[int], name: str, num_ranks: int | None
) -> list[tuple[int, ...]]:
    """The processes of each pipeline, in the order of ranks, as process groups of the files say; none if they don't.

    If it is known how many ranks a pipeline has, groups without a description count too: if those of that many ranks
    hold each process once.

    Raises:
        TraceError: a pipeline has a process that is not given.
    """
    found: set[tuple[int, ...]] = set()
    others: set[tuple[int, ...]] = set()
    for _, _, info in said:
        listed = info.get("pg_config")
        groups = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        for group in groups:
            ranks = group.get("ranks")
            if isinstance(ranks, list) and num_ranks in (None, len(ranks)):
                is_named = len(groups) == 1 or _PIPELINE.search(str(group.get("pg_desc")))
                (found if is_named else others).add(tuple(each for each in ranks if isinstance(each, int)))
    if num_ranks:
        whole = (sorted(each) for each in (found, others) if sorted(chain.from_iterable(each)) == sorted(given))
        return next(whole, [])
    for ranks in sorted(found):
        if absent := sorted(set(ranks) - given):
            raise TraceError(
                f"{name}: the pipeline of processes {', '.join(map(str, ranks))} has no file with forwards or "
                f"backwards of {', '.join(map(str, absent))}: give the files of all its "
                "processes, recorded in the same way"
            )
    return sorted(found - {()}) if set().union(*found) >= given else []


def _steps(events: Iterable[ProfileEvent], gpu: bool) -> dict[int, list[tuple[float, int]]]:
    """Where steps begin, by worker, as (ms, number)."""
    found: defaultdict[tuple[int, bool], list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        match = _STEP.fullmatch(event.name)
        if match:
            found[event.worker, event.category == GPU].append((event.start, int(match[1])))
    workers = {worker for worker, _ in found}
    return {worker: sorted(found.get((worker, gpu)) or found[worker, not gpu]) for worker in workers}


def _located(
    events: Sequence[ProfileEvent],
    reader: Names,
    steps: dict[int, list[tuple[float, int]]],
    pipelines: Sequence[Sequence[int]],
    num_ranks: int | None,
    num_microbatches: int | None,
    name: str,
    notes: list[str],
) -> list[TracedOp]:
    """The ops, each with its place. `notes` are added to."""
    workers = sorted({event.worker for event in events})
    said = [(event, reader.read(event.name, event.args)) for event in sorted(events, key=lambda event: event.start)]
    ops: defaultdict[int, set[tuple[int, int | None]]] = defaultdict(set)
    for event, found in said:
        if found is not None and (stage := found[1]["stage"]) is not None:
            ops[event.worker].add((stage, found[1]["microbatch"]))
    if not (ops or pipelines or num_ranks) and len(workers) > 3:
        notes.append(f"{len(workers)} processes are taken as one pipeline; --ranks where they are replicas")
    place = _places(workers, ops, pipelines, num_ranks, name)
    if num_microbatches is None and not steps and len(workers) > 1:
        num_microbatches = _microbatches_of_a_step(said)
    count: Counter[tuple[Any, ...]] = Counter()
    rows = []
    for event, found in said:
        if found is None:
            continue
        replica, rank = place[event.worker]
        kind, numbers = found
        rank = rank if numbers["rank"] is None else numbers["rank"]
        replica = replica if numbers["replica"] is None else numbers["replica"]
        compute = kind.scope is Scope.COMPUTE
        stage = numbers["stage"] if numbers["stage"] is not None else rank if compute else NONE
        microbatch, step = numbers["microbatch"], numbers["step"]
        begins = steps.get(event.worker)
        if step is None and begins:
            at = bisect_right(begins, (event.start + 1e-9, 1 << 60)) - 1
            if at < 0:
                continue  # before the first whole step
            step = begins[at][1]
        if microbatch is None and not compute:
            microbatch = NONE
        elif microbatch is None:
            number = count[event.worker, step, kind.kind, stage]
            count[event.worker, step, kind.kind, stage] += 1
            microbatch = number if num_microbatches is None else number % num_microbatches
            if step is None and num_microbatches is not None:
                step = number // num_microbatches
        if step is None:
            key = event.worker, "step", kind.name, stage, microbatch
            step = count[key]
            count[key] += 1
        rows.append(TracedOp(kind.name, step, replica, rank, stage, microbatch, event.start, event.end))
    return rows


def _too_early(rows: Iterable[TracedOp]) -> bool:
    """Whether a forward ends before that of the same microbatch on the stage before."""
    ended = {row[1:3] + row[4:6]: row.end for row in rows if kind_named(row.name).kind == "F"}
    return any(end < ended.get((*op[:2], op[2] - 1, op[3]), end) for op, end in ended.items())


def _microbatches_of_a_step(said: Iterable[tuple[ProfileEvent, NamedOp | None]]) -> int | None:
    """How many forwards the first stage's process, which waits longest, runs until each has its backward."""
    begun: Counter[int] = Counter()
    left: Counter[int] = Counter()
    first: dict[int, int] = {}
    for event, found in said:
        kind = "" if found is None else found[0].kind
        begun[event.worker] += kind == "F"
        left[event.worker] += (kind == "F") - (kind in ("B", "I"))
        if kind in ("B", "I") and not left[event.worker]:
            first.setdefault(event.worker, begun[event.worker])
    return max(first.values(), default=None)


def _places(
    workers: Sequence[int],
    ops: dict[int, set[tuple[int, int | None]]],
    pipelines: Sequence[Sequence[int]],
    num_ranks: int | None,
    name: str,
) -> dict[int, tuple[int, int]]:
    """Replica and rank of each worker: by the stages it has, by its pipeline's process group, else by its number.

    Workers that run the same stages for other microbatches are no replicas: their pipelines go in both directions.
    Other workers with the same stages are replicas of one rank. Ranks follow each other as their first workers do.
    """
    stages = {worker: tuple(sorted({stage for stage, _ in ops[worker]})) for worker in workers if worker in ops}
    alike = Counter(stages.values())
    several = [worker for worker, own in stages.items() if alike[own] > 1]
    if len(several) > 1 and sum(len(ops[worker]) for worker in several) == len(
        set().union(*(ops[worker] for worker in several))
    ):
        return {worker: (0, place) for place, worker in enumerate(workers)}
    if stages and num_ranks is None:
        seen: Counter[tuple[int, ...]] = Counter()
        found = dict.fromkeys(workers, (0, 0))
        for worker, own in stages.items():
            found[worker] = seen[own], list(alike).index(own)
            seen[own] += 1
        return found
    if pipelines:
        return {worker: (replica, rank) for replica, each in enumerate(pipelines) for rank, worker in enumerate(each)}
    ranks = len(workers) if num_ranks is None else num_ranks
    if len(workers) % ranks:
        raise TraceError(
            f"{name} has {len(workers)} processes, which are not whole pipelines of {ranks} ranks: are files missing?"
        )
    replicas = len(workers) // ranks
    return {worker: (place % replicas, place // replicas) for place, worker in enumerate(workers)}
