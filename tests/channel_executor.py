"""An executor of rows with messages over a channel, written apart from the package: it moves one thing at a time.

A rank is a place in its row. Each directed edge is a list of posted sends and a list of posted receives; the k-th
send meets the k-th receive. A stream is a list of messages, of which the first alone may move. Nothing has a time.
"""

from __future__ import annotations

import random

import penstock as ps
from penstock.schedule import Op

ENDED, HANGS, WRONG_DATA = "ended", "hangs", "wrong data"


def execute(schedule: ps.Schedule, channel: str, rng: random.Random) -> str:
    """How a run ends, its moves taken in a random order."""
    rows = [list(row) for row in schedule.order]
    there = {op for row in rows for op in row}
    last = schedule.num_stages - 1
    place = [0] * len(rows)
    done: set[Op] = set()
    arrived: set[Op] = set()  # receives whose message is there
    sends: dict[tuple[int, int], list[Op]] = {}
    receives: dict[tuple[int, int], list[Op]] = {}
    moved: dict[tuple[int, int], int] = {}
    streams: dict[object, list[tuple[tuple[int, int], int]]] = {}
    wrong = False
    made_by = {"SEND_F": "F", "SEND_B": "BI"}

    def peer(op: Op) -> int:
        stage = op.stage + (1 if op.kind in ("SEND_F", "RECV_B") else -1)
        return schedule.rank_of(stage, op.microbatch)

    def own_streams(rank: int, edge: tuple[int, int]) -> object:
        return {"nccl": rank, "nccl-pair": (rank, *sorted(edge)), "nccl-edge": (rank, edge)}.get(channel)

    def post(rank: int, op: Op) -> None:
        edge = (rank, peer(op)) if op.kind.startswith("SEND") else (peer(op), rank)
        posted = (sends if op.kind.startswith("SEND") else receives).setdefault(edge, [])
        if (stream := own_streams(rank, edge)) is not None:
            streams.setdefault(stream, []).append((edge, len(posted)))
        posted.append(op)

    def is_oldest(edge: tuple[int, int], number: int) -> bool:
        mine = [own_streams(rank, edge) for rank in edge]
        return all(stream is None or streams[stream][0] == (edge, number) for stream in mine)

    def transfer() -> bool:
        nonlocal wrong
        edges = list(sends)
        rng.shuffle(edges)
        for edge in edges:
            number = moved.get(edge, 0)
            has_receive = len(receives.get(edge, [])) > number
            if len(sends[edge]) <= number or not has_receive or not is_oldest(edge, number):
                continue
            sent, received = sends[edge][number], receives[edge][number]
            wrong |= (sent.kind[-1], sent.microbatch) != (received.kind[-1], received.microbatch)
            wrong |= sent.stage + (1 if sent.kind == "SEND_F" else -1) != received.stage
            arrived.add(received)
            moved[edge] = number + 1
            for rank in edge:
                if (stream := own_streams(rank, edge)) is not None:
                    streams[stream].pop(0)
            return True
        return False

    def can_run(op: Op) -> bool:
        kind, stage, microbatch = op
        if kind == "F":
            before = Op("F", stage - 1, microbatch)
            receive = Op("RECV_F", stage, microbatch)
            return stage == 0 or (receive in arrived if receive in there else before in done)
        if kind == "W":
            return Op("I", stage, microbatch) in done
        if Op("F", stage, microbatch) not in done:
            return False
        receive = Op("RECV_B", stage, microbatch)
        if receive in there:
            return receive in arrived
        return stage == last or bool({Op(each, stage + 1, microbatch) for each in "BI"} & done)

    while True:
        ranks = list(range(len(rows)))
        rng.shuffle(ranks)
        progress = False
        for rank in ranks:
            if place[rank] == len(rows[rank]):
                continue
            op = rows[rank][place[rank]]
            if op.kind[:4] == "SEND" and not {op._replace(kind=kind) for kind in made_by[op.kind]} & done:
                continue  # there is nothing to send yet
            if op.kind[:4] in ("SEND", "RECV"):
                post(rank, op)
            elif can_run(op):
                done.add(op)
            else:
                continue
            place[rank] += 1
            progress = True
            break
        if rng.random() < 0.5 or not progress:
            progress |= transfer()
        if not progress:
            break
    if any(place[rank] < len(row) for rank, row in enumerate(rows)):
        return HANGS
    while transfer():  # what no op needed
        pass
    return WRONG_DATA if wrong else ENDED
