"""What one late link costs, and three answers to it. Writes a picture of each to late-link.svg.

python examples/slow_link.py
"""

from __future__ import annotations

import penstock as ps
from penstock.draw import to_svg

RANKS, MICROBATCHES = 4, 12


def main() -> None:
    costs = ps.Costs.uniform(RANKS, f=10, i=10, w=10)  # ms
    late = ps.Links({(0, 1): 20.0})
    usual = ps.build("zb-h1", RANKS, MICROBATCHES)
    runs = {
        "no delay": ps.simulate(usual, costs),
        "frozen: each rank follows its order": ps.simulate(usual, costs, links=late),
        "hinted: ranks run what is ready": ps.simulate(usual, costs, links=late, dispatch="hinted"),
    }
    slack = ps.build("zb", RANKS, MICROBATCHES, warmup=[9, 5, 3, 1])
    runs["more warm-up before the late link, in more memory"] = ps.simulate(slack, costs, links=late)
    plan = ps.plan(costs, RANKS, MICROBATCHES, late, max_in_flight=4, time_limit=2.0)
    runs["planned for the delay, in zb-h1's memory"] = plan.timeline
    for title, ran in runs.items():
        print(f"{ran.makespan:5.0f} ms  {ran.bubble_ratio:4.0%} waiting  {title}")
    print(f"no order in that memory is shorter than {plan.lower_bound:.0f} ms")
    with open("late-link.svg", "w", encoding="utf-8") as file:
        file.write(to_svg(list(runs.values()), titles=list(runs)))


if __name__ == "__main__":
    main()
