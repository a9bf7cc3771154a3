"""What each op waits for: the one place that states how ops depend on each other along the chain of stages.

F(s, m)  after F(s-1, m)
B(s, m)  after F(s, m) and the backward (B or I) of (s+1, m)        I alike
W(s, m)  after I(s, m)
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.schedule.op import BACKWARD, FORWARD, INPUT, WEIGHT, Op


def predecessors(op: Op, num_stages: int, present: Mapping[Op, int]) -> list[Op]:
    """The ops whose results `op` needs, in a fixed order.

    `present` holds every op of the schedule: the backward of the next stage is its B or its I, whichever
    is there (I where neither is, so that the missing op has a name).
    """
    kind, stage, microbatch = op
    if kind == FORWARD:
        return [Op(FORWARD, stage - 1, microbatch)] if stage > 0 else []
    if kind == WEIGHT:
        return [Op(INPUT, stage, microbatch)]
    needed = [Op(FORWARD, stage, microbatch)]
    if stage + 1 < num_stages:
        full = Op(BACKWARD, stage + 1, microbatch)
        needed.append(full if full in present else Op(INPUT, stage + 1, microbatch))
    return needed


def carries_message(producer: Op, consumer: Op) -> bool:
    """Whether the dependency carries tensors when its ends lie on different ranks (activations, gradients)."""
    return producer.stage != consumer.stage
