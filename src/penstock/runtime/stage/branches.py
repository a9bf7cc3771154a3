"""Stages that branch and join: one payload for a stage from what several stages sent, and a share for each of them.

    text 0 --> 1 --.              stage 4 is called with (output of 1, output of 3); what goes back to 1 is the
                    >--> 4        gradient of the first. A stage with several targets adds their gradients up, that
    image 2 -> 3 --'              of the last stage first, as autograd does where it runs stages in their order.

Stages may work on microbatches of different sizes. The stage with the larger microbatch cuts it along dimension 0 to
send it, and joins what the several smaller ones send back:

    stage 0, four microbatches   0 1 2 3        stage 1, two   0 (0 and 1 joined)   1 (2 and 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.autograd import added
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.tensors.pytree import shifted
from penstock.runtime.tensors.storage import copy_of
from penstock.schedule import Op, Schedule, StageGraph
from penstock.schedule.op import BACKWARD


class Branches:
    """What a rank must know of branches, in one step.

    Args:
        schedule: whose stage graph says how stages feed one another.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._graph, self._num = schedule.graph, schedule.num_microbatches
        self._widths: dict[tuple[int, int], list[int]] = {}
        """By (stage, microbatch), how many gradients go back to each of its sources."""

    def inputs(self, op: Op, received: Sequence[Payload]) -> Payload | None:
        """What a forward is called with: None where the batch is its input."""
        if not received:
            return None
        sources = self._graph.sources[op.stage]
        parts = [_joined(group) for group in self._groups(op, sources, received)]
        self._widths[op.stage, op.microbatch] = [sum(part.needs_grad) for part in parts]
        return parts[0] if len(parts) == 1 else _tuple(parts)

    def arguments(self, stage: int) -> str:
        """In words, what a stage that joins others is called with; empty for any other."""
        sources = self._graph.sources[stage]
        if len(sources) < 2:
            return ""
        *others, last = map(str, sources)
        return (
            f"stage {stage} joins others: it is called with the outputs of stages {', '.join(others)} and {last} as "
            "positional arguments, in the order of the stages' numbers, whatever the order of the edges"
        )

    def gradients(self, op: Op, received: Sequence[Payload]) -> Payload | None:
        """The gradients of a stage's outputs: None where the loss is its output."""
        if not received:
            return None
        groups = self._groups(op, self._graph.targets[op.stage], received)
        *others, total = [_joined(group) for group in groups]
        for part in reversed(others):
            total = Payload.gradients([added(a, b) for a, b in zip(total.leaves, part.leaves, strict=True)])
        return total

    def share(self, edge: Edge, outcome: Payload) -> Payload:
        """Of what an op made, what goes along an edge."""
        (kind, stage, m), (_, other, their) = edge.producer, edge.consumer
        if kind != "F" and len(self._graph.sources[stage]) > 1:
            widths = self._widths[stage, m]
            place = self._graph.sources[stage].index(other)
            start = sum(widths[:place])
            mine = slice(start, start + widths[place])
            outcome = Payload.gradients(outcome.leaves[mine])
        parts = self._parts(stage, other)
        is_copied = kind == "F" and other != self._graph.targets[stage][-1]  # another target may change its own
        return outcome if parts == 1 and not is_copied else _part_of(outcome, parts, their % parts)

    def _groups(self, op: Op, stages: Sequence[int], received: Sequence[Payload]) -> list[list[Payload]]:
        """The payloads that came, stage by stage."""
        coming = iter(received)
        return [list(islice(coming, self._parts(op.stage, other))) for other in stages]

    def _parts(self, stage: int, other: int) -> int:
        """How many microbatches of another stage one of this stage's holds; 1 where that holds several of these."""
        return max(1, self._count(other) // self._count(stage))

    def _count(self, stage: int) -> int:
        return self._graph.microbatches_of(stage, self._num)


def is_plain(schedule: Schedule) -> bool:
    """Whether every stage feeds the next one alone, microbatch by microbatch."""
    graph = schedule.graph
    chain = all(sources == ((stage - 1,) if stage else ()) for stage, sources in enumerate(graph.sources))
    return chain and not set(graph.num_microbatches) - {schedule.num_microbatches}


def require_matching(graph: StageGraph, num_microbatches: int) -> None:
    """Raises RuntimeFailure where two stages' microbatches do not hold whole ones of each other, or what is run has
    not just one end.
    """
    for a, b in graph.edges:
        counts = graph.microbatches_of(a, num_microbatches), graph.microbatches_of(b, num_microbatches)
        if max(counts) % min(counts):
            raise RuntimeFailure(
                f"stage {a} works on {counts[0]} microbatches and stage {b}, which it feeds, on {counts[1]}; one "
                "must be a multiple of the other, so that whole microbatches are joined"
            )
    ends = loss_stages(graph)
    waiting = {need.after[1] for need in graph.needs if need.after[0] == BACKWARD}
    if len(ends) > 1 and set(ends) - waiting:
        raise RuntimeFailure(
            f"stages {', '.join(map(str, ends))} feed no other stage, and the loss is one stage's; lead every branch "
            "to the stage with the loss, or give each of these stages an op that its backwards wait for and that "
            "adds the loss (OpCall.add_loss)"
        )


def loss_stages(graph: StageGraph) -> list[int]:
    """The stages that feed no other: the one with the loss, or those that add to it (`OpCall.add_loss`)."""
    return [stage for stage, targets in enumerate(graph.targets) if not targets]


def has_many_ends(graph: StageGraph) -> bool:
    """Whether several stages feed no other, so that ops of the user's kinds make the loss."""
    return len(loss_stages(graph)) > 1


def loss_stage(graph: StageGraph) -> int:
    """The stage with the loss. Where ops of several stages add to it, the first of these stages."""
    return loss_stages(graph)[0]


def starts_of(graph: StageGraph) -> list[int]:
    """The stages that the batch goes into."""
    return [stage for stage, sources in enumerate(graph.sources) if not sources]


def _joined(payloads: Sequence[Payload]) -> Payload:
    """One payload of several microbatches' ones, along dimension 0."""
    first = payloads[0]
    if len(payloads) == 1:
        return first
    leaves: list[Tensor | None] = []
    for together in zip(*(p.leaves for p in payloads), strict=True):
        present = [leaf for leaf in together if leaf is not None]
        if any(p.skeleton != first.skeleton for p in payloads) or 0 < len(present) < len(together):
            raise RuntimeFailure(
                "microbatches that are to be joined have tensors, or gradients of these, in different places; return "
                "the same form for every microbatch"
            )
        leaves.append(torch.cat(present) if present else None)
    needs = [any(wanted) for wanted in zip(*(p.needs_grad for p in payloads), strict=True)]
    return Payload(leaves, first.skeleton, needs)


def _part_of(payload: Payload, parts: int, place: int) -> Payload:
    """One of the parts, in memory of its own: a stage that changes it in place changes no other part."""
    leaves = [None if leaf is None else copy_of(leaf.tensor_split(parts)[place]) for leaf in payload.leaves]
    return Payload(leaves, payload.skeleton, payload.needs_grad)


def _tuple(parts: Sequence[Payload]) -> Payload:
    """Payloads side by side, as a tuple of their values."""
    leaves = [leaf for part in parts for leaf in part.leaves]
    firsts = accumulate((len(part.leaves) for part in parts), initial=0)
    skeleton = ["tuple", [shifted(part.skeleton, first) for part, first in zip(parts, firsts)]]
    return Payload(leaves, skeleton, [needed for part in parts for needed in part.needs_grad])
