"""Models of several modalities: DistMM-Pipe, one branch of ranks a modality, and MLLM, with shared ends.

DistMM-Pipe (Huang et al. 2024; FlexPipe, section 2.2 and Figures 3 and 6): a contrastive loss compares all outputs of
all modalities in a batch. The branches run side by side and meet only there: a GATHER brings the outputs of several
microbatches together on the last rank of each branch. MLLM (Tessel, Lin et al. 2024; FlexPipe, Figure 1): embedding
and head on all ranks, else one stage per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from penstock.library.options import at_least, whole_multiple, whole_number, yes_or_no
from penstock.schedule import Needs, Op, Placement, Registered, Schedule, ScheduleError, StageGraph, one_to_one

_MOST_A_GATHER = 4
"""Microbatches a gather takes by default, or the largest divisor of their number below that."""


def distmm(
    num_ranks: int,
    num_microbatches: int,
    branches: Sequence[int] | None = None,
    gather_every: int | None = None,
    overlap: bool = False,
) -> Schedule:
    """Each branch is a 1F1B of its own, k - 1 forwards longer in warm-up; a GATHER every k microbatches joins them.

    Two branches of two ranks, k = 2 (`GATHER0` is one op, run by ranks 1 and 3 together):

        rank 0 | F0 F1 F2 .       .  B0 F3 B1 F4 B2 ...
        rank 1 | .  F0 F1 GATHER0 B0 F2 B1 F3 GATHER1 B2 ...
        rank 2 | F0 F1 F2 .       .  B0 F3 B1 F4 B2 ...
        rank 3 | .  F0 F1 GATHER0 B0 F2 B1 F3 GATHER1 B2 ...

    A rank i places before the end of its branch runs i + k - 1 forwards first; so when a gather has let k
    backwards go, the forwards of the next one fill the places between them, and the branches wait for one another
    only once every k microbatches. Bubble of a branch of q ranks: (q - 1)(f + b), and on its last rank the time of
    the gathers; peak min(i + k, N) activations.

    With `overlap` gathers are asynchronous (FlexPipe, section 2.2): each starts when its forwards have run, and k
    more forwards lie between it and the backwards that wait for it: F0 F1 GATHER0 F2 F3 GATHER1 B0 F4 B1 F5 GATHER2
    B2 ... So gathers that take no longer than these cost nothing; peak min(i + 2k, N).

    Args:
        branches: ranks of each branch, one stage per rank; by default two, halves of the ranks.
        gather_every: k, a divisor of N; by default the largest up to 4.
        overlap: whether gathers run beside the computation.
    """
    yes_or_no("distmm", "overlap", overlap)
    at_least("distmm", "ranks", num_ranks, 2)
    if branches is not None and not isinstance(branches, Sequence):
        raise ScheduleError(f"distmm: branches is {branches!r}; give the number of ranks of each", rule="options")
    sizes = (num_ranks - num_ranks // 2, num_ranks // 2) if branches is None else tuple(branches)
    for size in sizes:
        whole_number("distmm", "ranks of a branch", size)
    if len(sizes) < 2 or min(sizes) < 1 or sum(sizes) != num_ranks:
        raise ScheduleError(
            f"distmm: branches are {list(sizes)}; give at least two, each of at least 1 rank, "
            f"that add up to the {num_ranks} ranks",
            rule="options",
        )
    if gather_every is None:
        gather_every = max(k for k in range(1, _MOST_A_GATHER + 1) if num_microbatches % k == 0)
    at_least("distmm", "microbatches per gather", gather_every, 1)
    whole_multiple("distmm", "microbatches", num_microbatches, "that a gather takes", gather_every)

    ends = [end - 1 for end in accumulate(sizes)]
    rows = []
    for size, end in zip(sizes, ends, strict=True):
        for rank in range(end - size + 1, end + 1):
            ahead = 2 * gather_every if overlap else gather_every
            warmup = min(end - rank + ahead - 1, num_microbatches)
            row = [Op("F", rank, m) for m in range(warmup)]
            for m in range(num_microbatches):
                if warmup + m < num_microbatches:
                    row.append(Op("F", rank, warmup + m))
                if rank == end and m % gather_every == 0 and not overlap:
                    row.append(Op("GATHER", ends[0], m // gather_every))
                row.append(Op("B", rank, m))
            if rank == end and overlap:
                row = [each for op in row for each in (op, *_gather_after(op, ends[0], gather_every))]
            rows.append(row)
    graph = _towers(num_ranks, ends, num_microbatches // gather_every, gather_every, overlap)
    return Schedule(
        "distmm",
        one_to_one(num_ranks),
        tuple(map(tuple, rows)),
        (0,) * num_microbatches,
        stage_graph=graph,
    )


def _gather_after(op: Op, stage: int, gather_every: int) -> tuple[Op, ...]:
    """The gather whose last forward this is."""
    whole = op.kind == "F" and (op.microbatch + 1) % gather_every == 0
    return (Op("GATHER", stage, op.microbatch // gather_every),) if whole else ()


def _towers(num_stages: int, ends: list[int], num_gathers: int, gather_every: int, overlap: bool) -> StageGraph:
    """Chains that end at the stages `ends`, and the gathers that their last stages run together."""
    edges = tuple((stage, stage + 1) for stage in range(num_stages - 1) if stage not in ends)
    gather = ("GATHER", ends[0])
    before = [Needs(("F", end), gather, num_before=gather_every) for end in ends]
    after = [Needs(gather, ("B", end), num_after=gather_every) for end in ends]
    registered = Registered(*gather, num_gathers, ranks=tuple(ends), asynchronous=overlap)
    return StageGraph(num_stages, edges, registered=(registered,), needs=(*before, *after))


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
