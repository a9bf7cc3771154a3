"""List scheduling: drives the deciding core through time until every op has its place. Also runs compiled.

`run` makes the rows by rules. It fills in every op's start, laid out queue by queue. Rows are laid out rank by rank:
rank r's queue numbers are `rows[row_first[r]:row_first[r + 1]]`.
"""

from __future__ import annotations

from penstock.dispatch import listing
from penstock.dispatch.listing import NEVER, NOTHING, begin, decide, give_back, next_wake, ready_time
from penstock.dispatch.tables import Numbers, Records
from penstock.engine import min_tree
from penstock.engine.min_tree import least_of, sift

COMPILED_WITH = (min_tree, listing)
OPTIONS = listing.OPTIONS


def run(
    queues: Records,
    ranks: Records,
    slots: Records,
    slot_queues: Numbers,
    hosts: Numbers,
    needs: Records,
    unlocks: Numbers,
    own: Numbers,
    start_time: Numbers,
    rows: Numbers,
    row_first: Numbers,
    filled: Numbers,
    tree: Numbers,
) -> int:
    """Makes the rows. Returns how many ops started: fewer than all means that no rank can go on.

    Working space: `filled[rank]` is how long a row is, 0 at first; `tree` has `2 * leaves` entries,
    with `leaves` the power of two that holds all ranks: when each rank wakes, and the minima above.
    """
    for q in range(len(queues)):
        queues[q].ready_at = ready_time(q, queues, needs, start_time)
        if queues[q].ready_at < NEVER:
            for h in range(queues[q].host_first, queues[q].host_last):
                ranks[hosts[h]].wake = 0.0
    leaves = len(tree) // 2
    for leaf in range(leaves):
        tree[leaves + leaf] = ranks[leaf].wake if leaf < len(ranks) else NEVER
    for node in range(leaves - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
    started = 0
    while True:
        time = tree[1]
        if time == NEVER:
            return started
        rank = least_of(tree, leaves)
        if ranks[rank].beside >= 0:
            give_back(rank, time, queues, ranks, hosts, own, start_time)
        q = decide(rank, time, queues, ranks, slots, slot_queues, hosts)
        if q == NOTHING:
            ranks[rank].wake = next_wake(rank, time, queues, ranks, hosts, own, start_time)
            sift(tree, leaves + rank, ranks[rank].wake)
            continue
        begin(q, time, queues, ranks, slots, slot_queues, hosts, needs, unlocks, start_time)
        started += 1
        for h in range(queues[q].host_first, queues[q].host_last):
            host = hosts[h]
            rows[row_first[host] + filled[host]] = q
            filled[host] += 1
            sift(tree, leaves + host, ranks[host].wake)
            if ranks[host].beside >= 0:
                beside = ranks[host].beside
                sift(tree, leaves + beside, ranks[beside].wake)
        for u in range(queues[q].unlock_first, queues[q].unlock_last):
            target = unlocks[u]
            for h in range(queues[target].host_first, queues[target].host_last):
                sift(tree, leaves + hosts[h], ranks[hosts[h]].wake)
