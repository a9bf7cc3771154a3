"""A dozen cells on emulated devices, planned and in order of arrival: python -m experiments.uneven.emulated

A minute; ranks sleep through their ops, so nothing else may run beside. Writes results/emulated.json, and with
`--captioned`, of a captioner's steps, results/captioned_emulated.json.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import penstock as ps
from experiments.common.command import options
from experiments.uneven import protocol
from experiments.uneven.captioned import CaptionedStep
from experiments.uneven.record import add_cell
from penstock.planning import order_microbatches


def cell_of(name: str, num_ranks: int, sigma: float) -> dict[str, object]:
    """Makespans in ms, measured and simulated, of arrival frozen and of what was planned."""
    schedule = ps.build(name, num_ranks, 4 * num_ranks)
    costs = replace(protocol.even_costs(schedule), uneven=protocol.factors(sigma, 4 * num_ranks, 0))
    planned = order_microbatches(schedule, costs)
    found: dict[str, object] = {"cell": [name, num_ranks, sigma], "rule": planned.rule}
    for label, ran, dispatch in (
        ("arrival", schedule, "frozen"), ("planned", planned.schedule, planned.dispatch.value),
    ):  # fmt: skip
        run = ps.emulate(ran, costs, dispatch=dispatch)
        found[label] = [round(run.timelines[0].makespan, 2), round(run.simulated[0].makespan, 2)]
    return found


def captioned(name: str, num_ranks: int, num_microbatches: int) -> dict[str, object]:
    """The same of step 0 of a captioner."""
    step = CaptionedStep(name, num_ranks, num_microbatches, 0)
    stretch = protocol.CAPTIONED_MS / step.plan.arrival
    found: dict[str, object] = {"cell": [name, num_ranks, num_microbatches], "packing": step.plan.packing}
    for label, costs, dispatch in (
        ("arrival", step.arrival_costs(), "frozen"), ("planned", step.planned_costs(), step.plan.dispatches[0].value),
    ):  # fmt: skip
        run = ps.emulate(step.schedule, costs, dispatch=dispatch, memory_limit=step.plan.cap, stretch=stretch)
        found[label] = [round(run.timelines[0].makespan, 2), round(run.simulated[0].makespan, 2)]
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--captioned", action="store_true", help="a captioner's steps")
    of_captioner = parser.parse_args().captioned
    for number, cell in enumerate(protocol.CAPTIONED_EMULATED if of_captioner else protocol.EMULATED):
        found = captioned(*cell) if of_captioner else cell_of(*cell)  # type: ignore[arg-type]
        add_cell("captioned_emulated" if of_captioner else "emulated", number, [0], found)
        print(found, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
