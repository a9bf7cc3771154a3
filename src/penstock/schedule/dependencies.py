"""What each op waits for: the one place that states how ops depend on each other.

On a chain, with s - 1 and s + 1 the stages before and after (on a graph, all of them):

F(s, m)       after F(s-1, m)
B(s, m)       after F(s, m) and the backward (B or I) of (s+1, m)        I alike
W(s, m)       after I(s, m)
R(s, m)       after F(s, m); the backward is then after R(s, m)
U(s, n)       of the owner after all backwards (B or W) of its window, of another copy after the owner's;
              and after the copy's U before it (see `updates`)
PREDICT(s, n) of the owner after all GIVE of its window, of another copy after the owner's (see `tentative`)
SEND_F(s, m)  after F(s, m); F(s+1, m) after it and after RECV_F(s+1, m), which posts a receive and waits for
              nothing. SEND_B and RECV_B alike, downwards
registered    as its `Needs` say; what comes after B comes after W where the backward is split
pairs         the F of a pair also after all that its B needs; that B after the F (see `pairs`)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.schedule.op import BACKWARD, FORWARD, INPUT, KINDS, OF_UPDATES, RECOMPUTE, WEIGHT, Op
from penstock.schedule.stage_graph import StageGraph


def predecessors(op: Op, graph: StageGraph, present: Mapping[Op, int]) -> list[Op]:
    """The ops whose results `op` needs, in a fixed order.

    `present` holds every op of the schedule: the backward of the next stage is its B or its I, whichever
    is there (I where neither is, so that the missing op has a name).
    """
    if not graph.pairs:
        return _own_predecessors(op, graph, present)
    if op in graph.forward_of:
        return [graph.forward_of[op]]
    needed = _own_predecessors(op, graph, present)
    if (backward := graph.backward_of.get(op)) is not None:
        needed += [each for each in _own_predecessors(backward, graph, present) if each not in needed]
    return needed


def _own_predecessors(op: Op, graph: StageGraph, present: Mapping[Op, int]) -> list[Op]:
    """What an op needs for itself, whatever pair it is in."""
    kind, stage, microbatch = op
    if stage >= graph.num_stages:
        return []  # not a stage; `check` says so
    if kind == FORWARD:
        received = Op("RECV_F", stage, microbatch)
        if received in present:
            needed = [received, *(Op("SEND_F", before, microbatch) for before in graph.sources[stage])]
        else:
            needed = [
                Op(FORWARD, before, m)
                for before in graph.sources[stage]
                for m in graph.matching(stage, microbatch, before)
            ]
    elif kind == WEIGHT:
        needed = [Op(INPUT, stage, microbatch)]
    elif kind in KINDS:
        again = Op(RECOMPUTE, stage, microbatch)
        needed = [again if again in present else Op(FORWARD, stage, microbatch)]
        received = Op("RECV_B", stage, microbatch)
        if received in present:
            needed += [received, *(Op("SEND_B", after, microbatch) for after in graph.targets[stage])]
        else:
            needed += [
                _backward(after, m, present)
                for after in graph.targets[stage]
                for m in graph.matching(stage, microbatch, after)
            ]
    elif kind in OF_UPDATES:
        needed = graph.updates.needed(op, present) if graph.updates else []
    elif kind in (RECOMPUTE, "SEND_F"):
        needed = [Op(FORWARD, stage, microbatch)]
    elif kind == "SEND_B":
        needed = [_backward(stage, microbatch, present)]
    else:
        needed = []
    if graph.needs:
        for need in graph.needs_of.get((kind, stage), ()):
            for index in graph.needed(need, microbatch):
                needed.append(completed(Op(*need.before, index), present))
    return needed


def _backward(stage: int, microbatch: int, present: Mapping[Op, int]) -> Op:
    full = Op(BACKWARD, stage, microbatch)
    return full if full in present else Op(INPUT, stage, microbatch)


def completed(op: Op, present: Mapping[Op, int]) -> Op:
    """The op with which `op` is complete: the W of a backward that is split, else the op itself."""
    return op._replace(kind=WEIGHT) if op.kind == BACKWARD and op not in present else op


def compute_op(end: Op, present: Mapping[Op, int]) -> Op:
    """The op whose result a SEND carries, or the one that needs what a RECV brings."""
    kind, stage, microbatch = end
    return Op(FORWARD, stage, microbatch) if kind.endswith("_F") else _backward(stage, microbatch, present)


def carries_message(producer: Op, consumer: Op) -> bool:
    """Whether the dependency carries tensors when its ends lie on different ranks (activations, gradients; for
    updates those of weights, and parameters)."""
    return producer.stage != consumer.stage or consumer.kind in OF_UPDATES


Node = TypeVar("Node", bound=Hashable)
"""An op, or what else stands in rows that are run."""


@dataclass(frozen=True)
class UntimedRun(Generic[Node]):
    """Where a run without time ended: `steps[row]` ops done, and what each unfinished row waits for.

    Rows are the ranks and, where ops are asynchronous, their streams (`async_ops.rows_of`). `blocked[row]` is (op,
    peer row, full): the op the row waits for, or, where `full`, the op whose message found its channel to the peer
    full.
    """

    steps: tuple[int, ...]
    blocked: dict[int, tuple[Node, int, bool]]


def run_rows(
    rows: Sequence[Sequence[Node]],
    needs: Callable[[Node], list[Node]],
    together: Mapping[Node, tuple[int, ...]],
    begun: Sequence[int] = (),
    ran: Callable[[Node, int, list[Node]], None] | None = None,
) -> UntimedRun[Node]:
    """Runs all rows until none can go on. The end does not depend on the way there.

    Args:
        needs: returns what an op waits for, in any row.
        together: the rows of each op that several rows run at once.
        begun: ops that each row has done; empty from the beginning.
        ran: is told of each op that runs, its row and what it waited for; of an op of several rows once.
    """
    row_of_op = {op: number for number, row in enumerate(rows) for op in row}
    steps = [*begun] or [0] * len(rows)
    done = {op for row, count in zip(rows, steps, strict=True) for op in row[:count]}
    waiting: dict[Node, list[int]] = {}
    blocked: dict[int, tuple[Node, int, bool]] = {}
    ready = list(range(len(rows)))
    while ready:
        number = ready.pop()
        blocked.pop(number, None)
        row = rows[number]
        while steps[number] < len(row):
            op = row[steps[number]]
            needed = needs(op)
            missing = [each for each in needed if each not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(number)
                blocked[number] = missing[0], row_of_op.get(missing[0], number), False
                break
            others = [host for host in together[op] if host != number] if op in together else ()
            late = [host for host in others if rows[host][steps[host] : steps[host] + 1] != (op,)]
            if late:  # the last of its rows to come takes the others along
                blocked[number] = op, late[0], False
                break
            if ran is not None:
                ran(op, number, needed)
            for host in others:
                blocked.pop(host, None)
                steps[host] += 1
                ready.append(host)
            steps[number] += 1
            done.add(op)
            if op in waiting:
                ready += waiting.pop(op)
    return UntimedRun(tuple(steps), blocked)
