"""How long a search for better places of nodes takes, by the number of nodes and by what is late.

    python benchmarks/mesh/rerank.py --out benchmarks/mesh/rerank.json      a minute
    python benchmarks/mesh/rerank.py --readme      writes the table of README.md from rerank.json

Times are processor time of one process, so a busy machine changes them little. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import combinations, product
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.control import Configuration, Job, rerank
from penstock.control.configuration import peaks
from penstock.cost import Links

SIZES = ((8, 8, 32), (8, 16, 32), (8, 32, 32), (16, 64, 64))
"""Ranks, replicas and microbatches."""


def late_links(num_nodes: int) -> dict[str, Links]:
    """What is late, by name."""
    nodes, half = range(num_nodes), num_nodes // 2
    drawn = (Random(seed).sample(nodes, 2) for seed in range(6))
    return {
        "one link of a ring": Links({(2, 3): 30.0}),
        "one link of a ring at 5 Mbit/s": Links.parse("2:3=bandwidth:5Mbit/s"),
        "six links, drawn": Links(dict.fromkeys(drawn, 30.0)),
        "all links of a node": Links({(5, node): 30.0 for node in nodes if node != 5}),
        "all links between two halves": Links(dict.fromkeys(product(nodes[:half], nodes[half:]), 10.0)),
        "every fourth node, to each other": Links(dict.fromkeys(combinations(nodes[::4], 2), 20.0)),
    }


def row(pp: int, dp: int, num_microbatches: int, name: str) -> dict[str, object]:
    """Searches once."""
    costs = ps.Costs([10.0] * pp, [10.0] * pp, [10.0] * pp, gradient_bytes=[20e6] * pp)
    schedule = ps.build("zb-h1", pp, num_microbatches)
    start = Configuration(schedule, "frozen", (), tuple(2 * peak for peak in peaks(schedule, costs)))
    links = late_links(pp * dp)[name]
    begin = time.process_time()
    found = rerank(Job(costs, start), ps.Mesh(pp, dp), links)
    seconds = time.process_time() - begin
    times = {"ms_now": found.ms_now, "ms_then": found.ms_then, "moved": len(found.moved)}
    return {"nodes": pp * dp, "mesh": f"{pp} x {dp}", "late": name, "seconds": round(seconds, 2), **times}


def table(rows: list[dict[str, object]]) -> list[str]:
    names, sizes = dict.fromkeys(each["late"] for each in rows), dict.fromkeys(each["nodes"] for each in rows)
    seconds = {(each["late"], each["nodes"]): f"{each['seconds']} s" for each in rows}
    body = [[name, *(seconds.get((name, size), "") for size in sizes)] for name in names]
    return markdown(["late", *(f"{size:,} nodes" for size in sizes)], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", action="store_true")
    given = parser.parse_args()
    path = given.out or Path(__file__).with_name("rerank.json")
    if not given.readme:
        rows = [row(*size, name) for size in SIZES for name in late_links(4)]
        save_summary(path, {**record(), "rows": rows})
    write_between(Path(__file__).with_name("README.md"), "rerank", table(json.loads(path.read_text())["rows"]))


if __name__ == "__main__":
    main()
