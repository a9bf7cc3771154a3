"""The proof that a schedule can run: every op once, in its place, in an order all ranks can complete.

`check` goes from what is local to what is global, so that the first broken rule is also the most telling:

    placement     every rank, stage and microbatch is in range, every op on the rank that hosts its stage
    coverage      each (stage, microbatch) has one F, and one B or one I with one W; each copy each update once
    message       where messages are ops: each is there at both ends, in one order
    pairs         a forward and a full backward of another microbatch, side by side on one rank (`pairs`)
    order         no op before what it needs on the same rank
    microbatches  every queue of ops in the order of microbatches that is declared for it (`microbatch_order`)
    deadlock      the ranks, run together with bounded channels, all reach their last op
    mismatch      no more updates between a forward and its backward than the schedule allows
    versions      by pipedream-2bw's rule, what a microbatch reads is in one of two buffers
    memory        no rank holds more activations than the limit, or gives back more than it holds

Each rule is asked of all ops at once where the schedule has columns (`proof_columns`). Where it has none, or a rule
is broken, the ops are gone through one by one, which says where.

The deadlock rule is decided by running the order without time or tensors. By default a channel holds what its
schedule keeps in flight, which is how the runtime sizes its buffers, so sends alone never block and a deadlock is a
circle of ops that wait for one another. Warm-up counts with much slack between two ranks need this: the upper rank is
far ahead of the lower one's use of its messages.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from penstock.engine.tolerance import is_within, slack
from penstock.schedule import messages, proof_columns, proof_updates
from penstock.schedule.async_ops import activations_added, rows_of, walk_memory
from penstock.schedule.columns import edges_of, numbered
from penstock.schedule.dependencies import predecessors
from penstock.schedule.errors import ScheduleError, name_of, only
from penstock.schedule.liveness import UntimedRun, run_untimed
from penstock.schedule.microbatch_order import MicrobatchOrder, order_kind, places_of, queue_name, shown
from penstock.schedule.op import (
    BACKWARD,
    BUILT_IN,
    COMMUNICATION,
    FORWARD,
    INPUT,
    KINDS,
    OF_UPDATES,
    RECOMPUTE,
    WEIGHT,
    Op,
)
from penstock.schedule.pairs import wrong_pair
from penstock.schedule.schedule import Schedule, require_schedule
from penstock.schedule.stage_graph import Needs
from penstock.schedule.text import error_at, spot_of
from penstock.unknown_names import refuse_unknown


@refuse_unknown(ScheduleError)
def check(
    schedule: Schedule,
    *,
    channel_depth: int | None = None,
    channels: str | None = None,
    max_in_flight: float | None = None,
    max_mismatch: int | None = None,
) -> None:
    """Proves that a schedule can run, or raises an error that shows why it cannot.

    The proof shows that stages, ranks and microbatches are in range, that every op is there once and after all that
    it needs, that queues run their microbatches in order, that ranks never wait for each other in a circle, and that
    memory stays within its limit.

    Args:
        schedule: the schedule to prove.
        channel_depth: how many messages a channel holds before its sender must wait. A channel is one directed pair
            of ranks and one kind of message, activations or gradients. A message leaves it when the receiver uses it.
            By default a channel holds everything in flight over it, never more than its ranks' `peak_in_flight`.
        channels: what carries the messages of a schedule that has its messages as ops, see `schedule.messages`:
            "buffered", "gloo", "nccl", "nccl-pair" or "nccl-edge". On "nccl" and "nccl-pair" messages share streams,
            whose order must not hang either.
        max_in_flight: most stage activations that a rank may hold, counted from F to B or W. Default: the schedule's
            own limit.
        max_mismatch: most updates that a copy of a stage may make between a microbatch's forward and its backward.
            Default: the schedule's own bound, `updates.max_mismatch`.

    Raises:
        ScheduleError: the schedule breaks a rule. The error names the rule, and the rank, step and op.

    Examples:
        >>> import penstock as ps
        >>> ps.check(ps.build("zb-v", 4, 8))
        >>> try:
        ...     ps.check(ps.parse("rank 0 | F0 B0\\nrank 1 | B0 F0"))
        ... except ps.ScheduleError as error:
        ...     print(error)
        rank 1, step 0, B0 of stage 1: it needs F0 of stage 1, which comes later, at step 1 (rule: order)
          rank 1 | B0 F0
                   ^^

    References:
        AMDP, section 3.1, defines parameter mismatch.
    """
    require_schedule(schedule)
    _check_ranges(schedule)
    columns, found = schedule.columns, numbered(schedule)
    if found is None or not proof_columns.are_covered(found):
        _check_coverage(schedule)
    if columns is None:
        _check_messages(schedule)
    proof_updates.check_tentative(schedule)
    if (wrong := wrong_pair(schedule)) is not None:
        raise error_at(schedule, "pairs", *wrong)
    edges = None if found is None else edges_of(found, schedule.graph.targets)
    if columns is None or edges is None or not proof_columns.are_in_local_order(columns, edges):
        _check_local_order(schedule)
    if found is None or not proof_columns.are_in_microbatch_order(schedule, found):
        check_microbatch_order(schedule)
    if (
        columns is None
        or edges is None
        or channel_depth is not None
        or not proof_columns.run_to_their_ends(columns, edges)
    ):
        run = run_untimed(schedule, channel_depth)
        if run.blocked:
            raise _deadlock_error(schedule, run, channel_depth)
    if channels is not None:
        _check_channels(schedule, messages.require_channel(channels))
    most = schedule.updates.max_mismatch if max_mismatch is None and schedule.updates else max_mismatch
    if most is not None:
        proof_updates.check_mismatch(schedule, most)
    proof_updates.check_two_buffers(schedule)
    limit = schedule.max_in_flight if max_in_flight is None else max_in_flight
    if schedule.graph.holds:
        _check_given_back(schedule)
    if limit is not None and (columns is None or not proof_columns.are_within(columns, limit)):
        _check_memory(schedule, limit)


def _check_ranges(schedule: Schedule) -> None:
    placement = schedule.placement
    if schedule.num_microbatches < 1:
        raise _error("range", "the schedule has no microbatch; it needs at least 1")
    for k, hosts in enumerate(placement.pipelines):
        if max(hosts) >= schedule.num_ranks:
            there = f"but the schedule has {schedule.num_ranks} ranks"
            raise _error("placement", f"pipeline {k} places a stage on rank {max(hosts)}, {there}")
    if bad := [k for k in schedule.microbatch_pipeline if not 0 <= k < placement.num_pipelines]:
        text = f"a microbatch is given to pipeline {bad[0]}, but there are {placement.num_pipelines}"
        raise _error("placement", text)
    _check_counts(schedule)
    proof_updates.check_windows(schedule)
    alike = None if schedule.columns is None else proof_columns.one_of_each(schedule, schedule.columns)
    if alike is None or any(_misplaced(schedule, *spot) for spot in alike):
        for rank, row in enumerate(schedule.order):
            for step in range(len(row)):
                if error := _misplaced(schedule, rank, step):
                    raise error


def _misplaced(schedule: Schedule, rank: int, step: int) -> ScheduleError | None:
    """What is wrong with the kind, the numbers or the place of an op; None where all is well."""
    graph, op = schedule.graph, schedule.op_at(rank, step)
    registered = graph.registered_of.get((op.kind, op.stage))
    if op.kind not in BUILT_IN and registered is None:
        message = f"kind {op.kind!r} is not one of {', '.join(KINDS)}, and is not registered for stage {op.stage}"
        if glued := re.fullmatch(r"([FBIWR][0-9]+)([0-9]*[FBIWR])", op.kind):
            message += f"; put a space between {glued[1]} and {glued[2]}{op.microbatch}"
        return error_at(schedule, "kind", rank, step, op, message)
    if not 0 <= op.stage < schedule.num_stages:
        return error_at(schedule, "range", rank, step, op, only(schedule.num_stages, "stage"))
    if op.kind in OF_UPDATES:
        num_ops = proof_updates.num_updates_of(schedule, rank, step, op)
    elif registered:
        num_ops = registered.num_ops
        if registered.microbatches:
            if op.microbatch in registered.microbatches and op.microbatch < schedule.num_microbatches:
                num_ops = op.microbatch + 1
            else:
                some = ", ".join(map(str, registered.microbatches))
                rule = f"its kind has ops of microbatches {some} of this stage; the schedule's go from 0 to "
                rule += f"{schedule.num_microbatches - 1}"
                return error_at(schedule, "range", rank, step, op, rule)
    else:
        num_ops = graph.microbatches_of(op.stage, schedule.num_microbatches)
    if not 0 <= op.microbatch < num_ops:
        numbers = registered or op.kind in OF_UPDATES
        rule = f"its number goes from 0 to {num_ops - 1}" if numbers else only(num_ops, "microbatch")
        return error_at(schedule, "range", rank, step, op, rule)
    hosts = schedule.hosts(op)
    if rank not in hosts:
        where = f"rank {hosts[0]}" if len(hosts) == 1 else f"ranks {', '.join(map(str, hosts))}"
        rule = f"stage {op.stage} is placed on {where}, so the op belongs there"
        return error_at(schedule, "placement", rank, step, op, rule, peer=where)
    return None


def _check_counts(schedule: Schedule) -> None:
    """The stage graph's numbers against the schedule's."""
    graph, num_ranks = schedule.graph, schedule.num_ranks
    for stage, ranks in schedule.placement.shared:
        if max(ranks) >= num_ranks:
            raise _error("placement", f"stage {stage} is shared by ranks {ranks}, but there are {num_ranks}")
    if graph.num_microbatches and max(graph.num_microbatches) != schedule.num_microbatches:
        raise _error(
            "range",
            f"the stages work on {graph.num_microbatches} microbatches, so the schedule's number must be the largest "
            f"of them, not {schedule.num_microbatches}",
        )
    if graph.num_microbatches and schedule.placement.num_pipelines > 1:
        text = "stages with microbatch counts of their own need a placement with one pipeline"
        raise _error("placement", text)
    for need in graph.needs:
        _check_need(schedule, need)
    for registered in graph.registered:
        if registered.ranks and max(registered.ranks) >= num_ranks:
            text = f"kind {registered.kind} is on ranks {registered.ranks}, but the schedule has {num_ranks}"
            raise _error("placement", text)


def _check_need(schedule: Schedule, need: Needs) -> None:
    """The ops that a need names are there, in whole groups, as many of both."""
    graph, ends, sizes = schedule.graph, (need.before, need.after), (need.num_before, need.num_after)
    there = [graph.numbers_of(end, schedule.num_microbatches) for end in ends]
    said = " unlock ".join(f"{size} {kind} of stage {stage}" for size, (kind, stage) in zip(sizes, ends, strict=True))
    if need.pairs:
        for (kind, stage), numbers, named in zip(ends, there, zip(*need.pairs, strict=True), strict=True):
            if absent := [number for number in named if number not in numbers]:
                text = f"a need names op {absent[0]} of {kind} of stage {stage}, which is not there"
                raise _error("dependencies", text)
    elif graph.some_of.keys() & set(ends):
        if sizes != (1, 1):
            text = f"{said}, of which only some microbatches have one"
            raise _error("dependencies", text, "give a need of one for one, or pairs")
    elif divmod(len(there[0]), sizes[0]) != divmod(len(there[1]), sizes[1]) or len(there[0]) % sizes[0]:
        text = f"{said}, but there are {len(there[0])} {need.before[0]} and {len(there[1])} {need.after[0]}"
        raise _error("dependencies", text, "give sizes that make as many whole groups of the one as of the other")


def _error(rule: str, message: str, hint: str = "", **where: Any) -> ScheduleError:
    return ScheduleError(f"{message} (rule: {rule}){'; ' * bool(hint)}{hint}", rule=rule, **where)


def _check_coverage(schedule: Schedule) -> None:
    shared = schedule.has_shared_ops
    spot: dict[Op, tuple[int, int]] = {}
    seen: set[tuple[int, Op]] = set()
    for rank, row in enumerate(schedule.order):
        for step, op in enumerate(row):
            if ((rank, op) in seen) if shared else (op in spot):
                first = row.index(op) if shared else spot[op][1]
                message = f"the op occurs twice, first at step {first}; each op runs once"
                raise error_at(schedule, "coverage", rank, step, op, message, peer=f"step {first}")
            if shared:
                seen.add((rank, op))
            spot[op] = rank, step
    if shared:
        for op, (rank, step) in spot.items():
            if absent := [host for host in schedule.hosts(op) if (host, op) not in seen]:
                message = f"rank {absent[0]} runs it together with this rank, and its row has no such op"
                raise error_at(schedule, "coverage", rank, step, op, message, peer=f"rank {absent[0]}")
    graph = schedule.graph
    for registered in graph.registered:
        for index in registered.numbers:
            op = Op(registered.kind, registered.stage, index)
            if op not in spot:
                host = schedule.hosts(op)[0]
                text = f"rank {host}: {name_of(op)} is missing; {registered.num_ops} of its kind are registered"
                raise _error("coverage", text, rank=host, op=op)
    for stage in range(schedule.num_stages):
        for m in range(graph.microbatches_of(stage, schedule.num_microbatches)):
            f, b, i, w = (Op(kind, stage, m) for kind in (FORWARD, BACKWARD, INPUT, WEIGHT))
            for half in (i, w):
                if b in spot and half in spot:
                    message = f"the full backward is there too, at step {spot[b][1]}; use either B or I with W"
                    raise error_at(schedule, "coverage", *spot[half], half, message, peer=name_of(b))
            if f not in spot:
                raise _missing(schedule, f, spot.get(b) or spot.get(i) or spot.get(w))
            if b in spot:
                continue
            if i not in spot and w not in spot:
                raise _missing(
                    schedule, b, spot[f], f"{name_of(b)} is missing, with no {i.short()} and {w.short()} in its place"
                )
            if i not in spot or w not in spot:
                raise _missing(schedule, i if i not in spot else w, spot[w if i not in spot else i])
    proof_updates.check_every_update(schedule, spot)


def _missing(schedule: Schedule, op: Op, near: tuple[int, int] | None, what: str | None = None) -> ScheduleError:
    """`near` is the spot of an op of the same stage and microbatch, None where there is none."""
    rank, step = (schedule.rank_of(op.stage, op.microbatch), None) if near is None else near
    what = what or f"{name_of(op)} is missing{'' if near else ', and so is its backward'}"
    if not any(other.microbatch == op.microbatch for row in schedule.order for other in row):
        what += f", as no row has an op of microbatch {op.microbatch} (the schedule has {schedule.num_microbatches})"
    beside = "" if near is None else f", beside step {step}"
    text = (
        f"rank {rank}{beside}: {what}; each stage runs F and its backward once for every microbatch (rule: coverage)"
    )
    if near is not None:
        text += "\n" + spot_of(schedule, *near)
    return ScheduleError(text, rule="coverage", rank=rank, step=step, op=op, peer=name_of(op))


def _check_messages(schedule: Schedule) -> None:
    if not messages.has_communication(schedule):
        return
    if schedule.has_shared_ops or not schedule.graph.is_chain:
        rank, step, op = next(
            (r, s, op) for r, row in enumerate(schedule.order) for s, op in enumerate(row) if op.kind in COMMUNICATION
        )
        message = "messages as ops are for plain chains of stages, each on one rank; leave them out here"
        raise error_at(schedule, "message", rank, step, op, message)
    wrong = messages.find_mismatch(schedule)
    if wrong is not None:
        raise error_at(schedule, "message", *wrong)


def _check_local_order(schedule: Schedule) -> None:
    graph = schedule.graph
    for rank, row in enumerate(schedule.order):
        place = {op: step for step, op in enumerate(row)}
        for step, op in enumerate(row):
            for needed in predecessors(op, graph, place):
                if place.get(needed, -1) > step:
                    message = f"it needs {name_of(needed)}, which comes later, at step {place[needed]}"
                    raise error_at(schedule, "order", rank, step, op, message, peer=name_of(needed))


def _deadlock_error(schedule: Schedule, run: UntimedRun[Op], channel_depth: int | None) -> ScheduleError:
    """Follows who waits for whom from the first blocked rank to the cycle, and tells the cycle."""
    path, rank = [], min(run.blocked)
    while rank in run.blocked and rank not in path:
        path.append(rank)
        rank = run.blocked[rank][1]
    cycle = path[path.index(rank) :] if rank in path else path
    lines = []
    rows, num_ranks = rows_of(schedule), schedule.num_ranks

    def place(row: int) -> tuple[int, int, str]:
        """Rank and step of what a row waits at, and what to call who waits."""
        at = run.steps[row] - (1 if run.blocked[row][2] else 0)
        rank = row % num_ranks
        return rank, schedule.order[rank].index(rows[row][at]), f"rank {rank}" + " (its stream)" * (row >= num_ranks)

    for waiting in cycle:
        op, peer, full = run.blocked[waiting]
        _, step, name = place(waiting)
        if full:
            holds = f"its channel to rank {peer} holds {channel_depth}"
            lines.append(f"{name} at step {step} cannot send {name_of(op)}: {holds}")
        else:
            row = schedule.order[peer % num_ranks]
            there = row.index(op) if op in row else "(nowhere)"
            waits = f"waits for {name_of(op)} from rank {peer % num_ranks}, which runs it at step {there}"
            lines.append(f"{name} at step {step} {waits}")
    op, peer, full = run.blocked[cycle[0]]
    first, step, _ = place(cycle[0])
    own = schedule.order[first][step]
    text = f"rank {first}, step {step}, {name_of(own)}: the ranks wait for one another (rule: deadlock)\n"
    text += "\n".join(f"  {line}" for line in lines)
    for waiting in cycle:
        rank, step_there, _ = place(waiting)
        text += "\n" + spot_of(schedule, rank, step_there)
    peer %= num_ranks
    return ScheduleError(text, rule="deadlock", rank=first, step=step, op=own, peer=f"{name_of(op)} on rank {peer}")


def _check_channels(schedule: Schedule, channels: str) -> None:
    """No messages wait for one another on the streams that they share."""
    if not messages.has_communication(schedule):
        if schedule.num_ranks == 1:
            return
        text = f"the schedule has no messages as ops, so nothing is proved of channels {channels!r}"
        hint = f"place them with ps.passes.add_communication(schedule, channels={channels!r})"
        raise _error("message", text, hint)
    if not messages.shares_streams(channels):
        return  # a circle of waits is one of the compute ops
    network = messages.message_network(schedule, channels)
    circle = messages.find_circle(network)
    if not circle:
        return
    op = next(messages.message_at(network, node).send for node in circle if node >= len(network.ops))
    first = network.ops.index(op)
    rank, step = network.rank[first], network.step[first]
    text = f"rank {rank}, step {step}, {op}: messages wait for one another on {channels} (rule: deadlock)"
    lines = [f"\n  {line}" for line in messages.explain_circle(network, circle)]
    raise ScheduleError(
        f"{text}{''.join(lines)}\n{spot_of(schedule, rank, step)}", rule="deadlock", rank=rank, step=step, op=op
    )


def _check_memory(schedule: Schedule, limit: float) -> None:
    """No rank holds more than the limit in its order, in which ops wait for room under the schedule's own limit."""
    for rank, row in enumerate(schedule.order):
        levels, _ = walk_memory(schedule, row, schedule.max_in_flight)
        for step, (op, held) in enumerate(zip(row, levels, strict=True)):
            if not is_within(held, limit):
                message = f"the rank would hold {held:g} stage activations, the limit is {limit:g}; "
                waiting = max(walk_memory(schedule, row, limit)[0])
                if schedule.asynchronous and schedule.max_in_flight is None and is_within(waiting, limit):
                    message += "give the schedule that max_in_flight, so that ops wait for what is given back"
                else:
                    message += "let a backward run before it, or raise the limit"
                raise error_at(schedule, "memory", rank, step, op, message)


def _check_given_back(schedule: Schedule) -> None:
    """What registered ops hold: never less than nothing is held, and each asynchronous one could end at its place.

    The second is why no cap can lock ranks: whatever they do out of turn leaves them able to go on in their order,
    each op ending before the next.
    """
    for rank, row in enumerate(schedule.order):
        again = {(op.stage, op.microbatch) for op in row if op.kind == RECOMPUTE}
        held: dict[int, float] = {}
        for step, op in enumerate(row):
            held[op.stage] = held.get(op.stage, 0.0) + activations_added(op, again, schedule.graph.holds)
            if held[op.stage] < -slack(1):
                message = f"it gives back {-held[op.stage]:g} stage activations more than stage {op.stage} holds"
                if schedule.graph.holds:
                    message += "; an op that holds as much again belongs before the backward, as RELOAD after OFFLOAD"
                raise error_at(schedule, "memory", rank, step, op, message)
    graph = schedule.stage_graph
    if graph is None or not any(name in schedule.asynchronous for name in graph.holds):
        return
    there = tuple(replace(r, asynchronous=r.asynchronous and not r.holds) for r in graph.registered)
    in_place = replace(schedule, stage_graph=replace(graph, registered=there))
    run = run_untimed(in_place, None)
    for op, peer, _ in run.blocked.values():
        rank = peer % schedule.num_ranks
        raise _error(
            "memory",
            f"an asynchronous op that holds memory waits for what comes after it: {name_of(op)} on rank {rank} would "
            "not be reached if it ended at its place, and a rank that is out of memory would wait forever",
            "move it behind what it waits for",
            rank=rank,
            op=op,
        )


_CHAINS: dict[str, tuple[str, ...]] = {
    FORWARD: (FORWARD,),
    BACKWARD: (INPUT, WEIGHT),
    INPUT: (INPUT,),
    WEIGHT: (WEIGHT,),
    RECOMPUTE: (RECOMPUTE,),
} | dict.fromkeys((*COMMUNICATION, *OF_UPDATES), ())
"""The chains that an op is a part of, each of which comes in order; a registered kind has its own. B is in that of I,
as both add to the gradients that do not wait, and in that of W, which adds to those that do. Messages are matched by
a rule of their own, and updates need one another."""


def check_microbatch_order(schedule: Schedule) -> None:
    """Every queue runs its microbatches in its declared order; the ops of a schedule that is covered."""
    places = places_of(schedule.microbatch_orders)
    for rank, row in enumerate(schedule.order):
        reached: dict[tuple[str, int, int], tuple[int, int]] = {}  # the last place of each queue, and its step
        for step, op in enumerate(row):
            for chain in _CHAINS.get(op.kind, (op.kind,)):
                pipeline = schedule.pipeline_of(op)
                declared = places.get((order_kind(op.kind), op.stage, pipeline))
                place = op.microbatch if declared is None else declared[op.microbatch]
                before = reached.get((chain, op.stage, pipeline))
                if before is not None and place < before[0]:
                    raise _out_of_order(schedule, rank, step, before[1])
                reached[chain, op.stage, pipeline] = place, step


def _out_of_order(schedule: Schedule, rank: int, step: int, before_step: int) -> ScheduleError:
    """The error at the op that comes too late; it tells what came before it."""
    op, before = schedule.order[rank][step], schedule.order[rank][before_step]
    kind, pipeline = order_kind(op.kind), schedule.pipeline_of(op)
    queue = queue_name(schedule, MicrobatchOrder(kind, op.stage, (), pipeline))
    others = ", which I, W and R keep too," if kind == BACKWARD else ""
    declare = f"microbatch_orders=(ps.schedule.MicrobatchOrder({kind!r}, {op.stage}, (...)),)"
    if kind in (FORWARD, BACKWARD):
        way = "forward" if kind == FORWARD else "backward"
        declare = f"ps.schedule.declare_order(schedule, {way}=[...])"
    message = (
        f"{name_of(before)} comes before it, at step {before_step}, but the order of {queue}{others} is "
        f"{shown(schedule.microbatches_of(kind, op.stage, pipeline))}. Sums depend on it: keep the order, or declare "
        f"another with {declare}, for a file with ps.load(..., declare_order=True) or penstock show --declare-order "
        "--out"
    )
    return error_at(schedule, "microbatches", rank, step, op, message, peer=name_of(before))
