"""MLLM (Tessel, Lin et al. 2024; FlexPipe, Figure 1): embedding and head on all ranks, else one stage per rank."""

from __future__ import annotations

from penstock.schedule import Op, Placement, Schedule


def mllm(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage 0 (embedding) and stage p + 1 (head with loss) on all ranks at once, stage i + 1 on rank i.

    A large vocabulary makes the first and the last stage several times slower than the others; cut along it they
    weigh the same on every rank. Two ranks; E e H h are forward and backward of embedding and head, and
    stand in both rows at once; F and B are the rank's own stage:

        rank 0 | E0 F0 .  E1 H0 h0 F1 .  .  .  E2 H1 h1 F2 B0-----> e0 H2 h2 B1-----> e1 B2-----> e2
        rank 1 | E0 .  F0 E1 H0 h0 B0-----> F1 E2 H1 h1 B1-----> F2 e0 H2 h2 B2-----> e1 .  .  .  e2

    All ranks meet for the shared ops and then work apart for one F and one B, round after round. A forward moves on
    by two ranks a round, since ranks whose F comes before B alternate with ranks whose F comes after it, and a
    backward by one. Where F, h, e, E and H take 1 and B takes 3, as in Tessel, the makespan is 8N + 4(p - 1) for
    every p and N: 8N + 12 on 4 ranks and 8N + 28 on 8, Tessel's totals, which its search reaches in minutes or not
    at all. No order of these ops is shorter: the last rank is idle while the first microbatch comes down to it
    and while the last one goes back up, and meanwhile a shared op cannot run.

    Peak on rank i: 1 + 3(p - 1 - i)/2, rounded up, activations of its own stage (fewer if N is), so about 3p/2
    on the first rank and 1 on the last; besides them those of embedding and head, where they keep any.
    """
    last = num_ranks - 1
    odd = num_ranks % 2

    def forward_round(rank: int) -> int:
        return (rank + odd) // 2

    turn = forward_round(last) + 1  # the round in which a microbatch that enters in round 0 turns round
    num_rounds = num_microbatches + turn + num_ranks
    rows: list[list[Op]] = [[] for _ in range(num_ranks)]

    def add(rank: int, kind: str, stage: int, microbatch: int) -> None:
        if 0 <= microbatch < num_microbatches:
            rows[rank].append(Op(kind, stage, microbatch))

    for round_ in range(num_rounds):
        for rank in range(num_ranks):
            # What needs nothing from the last round comes first, so that messages have a little more time.
            add(rank, "F", 0, round_)
            add(rank, "B", 0, round_ - turn - num_ranks)
            add(rank, "F", num_ranks + 1, round_ - turn)
            add(rank, "B", num_ranks + 1, round_ - turn)
            own = [("F", round_ - forward_round(rank)), ("B", round_ - turn - (last - rank))]
            forward_first = (last - rank) % 2 == 1
            for kind, microbatch in own if forward_first else own[::-1]:
                add(rank, kind, rank + 1, microbatch)
    everyone = tuple(range(num_ranks))
    shared = ((0, everyone), (num_ranks + 1, everyone)) if num_ranks > 1 else ()
    return Schedule.of("mllm", Placement(((0, *everyone, 0),), shared), rows, num_microbatches)
