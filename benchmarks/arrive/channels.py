"""Plans for each channel, simulated: how far from what no order on this channel can beat. README.md has the protocol.

python benchmarks/arrive/channels.py --out benchmarks/arrive/channels.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Hashable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import penstock as ps
from channel_executor import ENDED, execute
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from penstock.passes import add_communication, remove_communication
from penstock.program import placements

FOLDER = Path(__file__).resolve().parent
CASES, SECONDS = 40, 20.0
STREAMS = {"nccl": 1.05, "nccl-pair": 1.05, "nccl-edge": 1.03}
"""Of each channel with streams, the most that a plan may take of the stream's bound."""


class Case(NamedTuple):
    num_ranks: int
    num_microbatches: int
    placement: str
    costs: ps.Costs
    links: ps.Links
    late: dict[tuple[int, int], tuple[float, float]]
    """Of each late pair of ranks, ms of latency and bytes per ms (0: size does not matter)."""


def draw(number: int) -> Case:
    rng = random.Random(f"channels {number}")
    num_ranks, num_microbatches = rng.choice([3, 4, 6, 8]), rng.choice([8, 12, 16, 24])
    placement = rng.choice(["one-to-one", "one-to-one", "v-shape", "circular"])
    num_stages = num_ranks * (1 if placement == "one-to-one" else 2)
    f, i, w = ([float(rng.randint(5, 15)) for _ in range(num_stages)] for _ in "fiw")
    w[0], i[0] = w[0] + i[0], 0.0  # as torch runs the first stage
    costs = ps.Costs(f, i, w, message_bytes=[1e6 * rng.randint(1, 8) for _ in range(num_stages)])
    late = {}
    for _ in range(rng.randint(1, 2)):
        rank = rng.randrange(num_ranks - 1)
        ms = 10.0 * num_stages / num_ranks * rng.choice([0.25, 0.5, 1, 2, 3])
        late[rank, rank + 1] = ms, rng.choice([0.0, 1e6])
    links = ps.Links(
        {pair: f"latency:{ms:g}ms" + "+bandwidth:1GB/s" * (rate > 0) for pair, (ms, rate) in late.items()}
    )
    return Case(num_ranks, num_microbatches, placement, costs, links, late)


def stream_bound(case: Case, channel: str) -> float:
    """What no order on a channel can beat: all work of a rank or a stream, after the least that comes before it, and
    for a stream before the least that must follow. Written apart from the planner."""
    hosts = placements.named(case.placement, case.num_ranks, case.costs.num_stages).pipelines[0]
    steps: list[tuple[list[Hashable], float]] = []  # the way of one microbatch, each part with what it keeps busy

    def message(source: int, target: int, size: float) -> None:
        latency, rate = case.late.get((min(source, target), max(source, target)), (0.0, 0.0))
        ends = {"nccl": [("stream", source), ("stream", target)], "nccl-pair": [("pair", *sorted((source, target)))]}
        ms = latency + (size / rate if rate else 0.0)
        steps.append((list(ends.get(channel, [("edge", source, target)])), ms))

    stages = range(len(hosts))
    for stage in stages:
        if stage and hosts[stage] != hosts[stage - 1]:
            message(hosts[stage - 1], hosts[stage], case.costs.message_bytes[stage - 1])
        steps.append(([("rank", hosts[stage])], case.costs.f[stage]))
    for stage in reversed(stages):
        steps.append(([("rank", hosts[stage])], case.costs.i[stage]))
        if stage and hosts[stage] != hosts[stage - 1]:
            message(hosts[stage], hosts[stage - 1], case.costs.message_bytes[stage - 1])
    # A W may follow its I at any time, so it counts as work and, after the last I, as what must follow.
    weights = {stage: case.costs.w[stage] for stage in stages}
    ends, at = [], 0.0
    for _, ms in steps:
        at += ms
        ends.append(at)
    total = ends[-1] + weights[0]
    best = total
    for resource in {name for names, _ in steps for name in names}:
        mine = [n for n, (names, _) in enumerate(steps) if resource in names]
        work = sum(steps[n][1] for n in mine)
        head = min(ends[n] - steps[n][1] for n in mine)
        if resource[0] == "rank":  # type: ignore[index]
            work += sum(weights[stage] for stage in stages if hosts[stage] == resource[1])  # type: ignore[index]
            tail = 0.0
        else:
            tail = total - max(ends[n] for n in mine)
        best = max(best, head + case.num_microbatches * work + tail)
    return best


def run(number: int) -> dict[str, Any]:
    case = draw(number)
    given: dict[str, Any] = {"placement": case.placement, "time_limit": SECONDS}
    shape = case.costs, case.num_ranks, case.num_microbatches
    found: dict[str, Any] = {
        "case": number,
        "shape": [case.num_ranks, case.num_microbatches, case.placement],
        "links": str(case.links),
    }
    healthy = ps.plan(*shape, **given)
    found["healthy"] = {}
    for channel in ("gloo", *STREAMS):
        rows = add_communication(healthy.schedule, case.costs, channels=channel)
        took = ps.simulate(rows, case.costs, channels=channel).makespan
        found["healthy"][channel] = round(took / healthy.makespan, 4)
    plan = ps.plan(*shape, case.links, channels="gloo", **given)
    proved(plan, "gloo", number)
    order = remove_communication(plan.schedule)
    ways = {
        "first": add_communication(order, case.costs, case.links, channels="gloo", most_posted=order.num_ops),
        "blind": add_communication(order, case.costs, channels="gloo"),
    }
    ms = {
        way: ps.simulate(rows, case.costs, links=case.links, channels="gloo").makespan for way, rows in ways.items()
    }
    found["gloo"] = [round(each, 3) for each in (ms["first"], plan.makespan, ms["blind"], plan.lower_bound)]
    for channel in STREAMS:
        placed = ps.simulate(order, case.costs, links=case.links, channels=channel).makespan
        plan = ps.plan(*shape, case.links, channels=channel, **given)
        proved(plan, channel, number)
        assert plan.makespan == ps.simulate(plan.schedule, case.costs, links=case.links, channels=channel).makespan
        bound = max(stream_bound(case, channel), found["gloo"][3])
        found[channel] = [round(each, 3) for each in (bound, plan.lower_bound, plan.makespan, placed)]
    return found


def proved(plan: ps.planning.Plan, channel: str, number: int) -> None:
    ps.check(plan.schedule, channels=channel)
    assert execute(plan.schedule, channel, random.Random(number)) == ENDED
    assert plan.certificate.channel == channel


def table(results: dict[str, Any]) -> list[str]:
    cases, rows = results["cases"], []

    def row(name: str, aim: float, ratios: list[float], proved: str) -> None:
        within = sum(each <= aim + 5e-5 for each in ratios)
        numbers = [f"{median(ratios):.3f}", f"{max(ratios):.3f}", f"{aim}", f"{within} of {len(ratios)}"]
        rows.append([name, *numbers, proved])

    row("gloo over all receives first", 1.001, [case["gloo"][1] / case["gloo"][0] for case in cases], "")
    row("the same, placed without the links", 1.001, [case["gloo"][2] / case["gloo"][0] for case in cases], "")
    row("healthy links over no channel", 1.025, [max(case["healthy"].values()) for case in cases], "")
    for channel, aim in STREAMS.items():
        over = [case[channel][2] / case[channel][0] for case in cases]
        gaps = [case[channel][2] / case[channel][1] for case in cases]
        row(f"{channel} over the stream's bound", aim, over, f"{median(gaps):.3f}, {max(gaps):.3f}")
        rows.append([f"{channel}, placed alone", *(f"{x:.3f}" for x in placed_alone(cases, channel)), "", "", ""])
    return markdown(["simulated", "median", "worst", "aim", "within", "over the proved bound: median, worst"], rows)


def placed_alone(cases: list[dict[str, Any]], channel: str) -> tuple[float, float]:
    ratios = [case[channel][3] / case[channel][0] for case in cases]
    return median(ratios), max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", action="store_true")
    given = parser.parse_args()
    if given.out:
        header = json.dumps(record())
        lines = []
        for number in range(CASES):
            lines.append("  " + json.dumps(run(number)))
            print(lines[-1], flush=True)
        text = f'{{\n "record": {header},\n "cases": [\n' + ",\n".join(lines) + "\n ]\n}\n"
        given.out.write_text(text, encoding="utf-8")
    if given.readme:
        write_between(FOLDER / "README.md", "channels", table(json.loads((FOLDER / "channels.json").read_text())))


if __name__ == "__main__":
    main()
