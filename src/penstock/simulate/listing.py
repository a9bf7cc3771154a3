"""List scheduling: drives the deciding core through time until every op has its place. Also runs compiled.

`run` makes the rows by rules. It fills in every op's start, laid out queue by queue. Rows are laid out rank by rank:
rank r's queue numbers are `rows[row_first[r]:row_first[r + 1]]`.
"""

from __future__ import annotations

from penstock.dispatch import listing
from penstock.dispatch.listing import NEVER, NOTHING, begin, decide, give_back, next_wake, ready_time
from penstock.dispatch.tables import Numbers, Records

COMPILED_WITH = (listing,)
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
    winners: Numbers,
) -> int:
    """Makes the rows. Returns how many ops started: fewer than all means that no rank can go on.

    Working space: `filled[rank]` is how long a row is, 0 at first; `winners` has `2 * num_leaves` entries, with
    `num_leaves` the power of two that holds all ranks: a tree in which each node names the rank below it that
    wakes first, the lower one where two wake at once.
    """
    for q in range(len(queues)):
        queues[q].ready_at = ready_time(q, queues, needs, start_time)
        if queues[q].ready_at < NEVER:
            for h in range(queues[q].host_first, queues[q].host_last):
                ranks[hosts[h]].wake = 0.0
    num_leaves = len(winners) // 2
    for leaf in range(num_leaves):
        winners[num_leaves + leaf] = leaf if leaf < len(ranks) else NOTHING
    for node in range(num_leaves - 1, 0, -1):
        winners[node] = earlier(winners[2 * node], winners[2 * node + 1], ranks)
    started = 0
    while True:
        rank = winners[1]
        time = ranks[rank].wake
        if time == NEVER:
            return started
        if ranks[rank].beside >= 0:
            give_back(rank, time, queues, ranks, hosts, own, start_time)
        q = decide(rank, time, queues, ranks, slots, slot_queues, hosts)
        if q == NOTHING:
            ranks[rank].wake = next_wake(rank, time, queues, ranks, hosts, own, start_time)
            replay(rank, winners, ranks)
            continue
        begin(q, time, queues, ranks, slots, slot_queues, hosts, needs, unlocks, start_time)
        started += 1
        for h in range(queues[q].host_first, queues[q].host_last):
            host = hosts[h]
            rows[row_first[host] + filled[host]] = q
            filled[host] += 1
            replay(host, winners, ranks)
            if ranks[host].beside >= 0:
                replay(ranks[host].beside, winners, ranks)
        for u in range(queues[q].unlock_first, queues[q].unlock_last):
            target = unlocks[u]
            for h in range(queues[target].host_first, queues[target].host_last):
                replay(hosts[h], winners, ranks)


def earlier(a: int, b: int, ranks: Records) -> int:
    """Which of two ranks wakes first, `a` where they wake at once; either may be NOTHING."""
    if b == NOTHING or (a != NOTHING and ranks[a].wake <= ranks[b].wake):
        return a
    return b


def replay(rank: int, winners: Numbers, ranks: Records) -> None:
    """Settles the tree after a rank's wake has changed, up to where nothing changes any more."""
    node = (len(winners) // 2 + rank) // 2
    while node > 0:
        winner = earlier(winners[2 * node], winners[2 * node + 1], ranks)
        if winner == winners[node] and winner != rank:
            return
        winners[node] = winner
        node //= 2
