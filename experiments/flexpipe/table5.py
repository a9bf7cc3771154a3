"""Table 5: seconds that a search takes, by the number of devices; and Figure 11: what is found on four.

    python -m experiments.flexpipe.table5             three minutes
    python -m experiments.flexpipe.table5 --show      what was found last

The placement is Tessel's: embedding and head on all devices. The paper says neither how many microbatches were
searched for nor with which times; here it is GPT 5B with 256K words and 4 microbatches a device. `FlexPipe` is the
whole of its grid, each placement's best with its gradients separated, `ours` the wider one (`grid.py`), both by
`penstock.planning.search_space`; in the seconds the winner is built, proved and simulated. One core, compiled code
loaded before. `Tessel here` is its repetend search (`tessel.py`) with a limit of time; where that ends it, what was
found until then counts, and more devices are not tried. The library's `mllm` has Tessel's makespan in Tessel's times
for every number of devices by a formula, without a search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf

import penstock as ps
from experiments.common.command import options
from experiments.common.results import Row, load, save, table
from experiments.flexpipe import RESULTS, tessel
from experiments.flexpipe.methods import METHODS, SEARCHED, Run, separated
from experiments.flexpipe.setups import GPT_5B, Setup
from penstock.draw import to_svg

PAPER: dict[int, tuple[float | None, float | None, float]] = {
    2: (1.29, 0.26, 4.73),
    4: (163.62, 11.1, 8.28),
    8: (None, 729.74, 71.28),
    16: (None, None, 107.34),
    32: (None, None, 534.78),
}
"""Tessel, Tessel-fast, FlexPipe; None where the search fails."""
VOCABULARY = 256
MICROBATCHES_A_DEVICE = 4
DRAWN, DRAWN_MICROBATCHES = 4, 8


def setup_of(num_devices: int, num_microbatches: int) -> Setup:
    """One replica."""
    return Setup(GPT_5B, VOCABULARY, num_devices, 1, 1, batch=num_microbatches)


def row_of(num_devices: int) -> Row:
    setup = setup_of(num_devices, MICROBATCHES_A_DEVICE * num_devices)
    row: Row = {"devices": num_devices}
    for method in SEARCHED:
        began = time.perf_counter()
        best = found(method, setup)[0]
        makespan = best.timeline.makespan
        row |= {
            f"{method} seconds": time.perf_counter() - began,
            f"{method} makespan_ms": makespan,
            f"{method} bubble": best.timeline.bubble_ratio,
            f"{method} placement": best.placement,
        }
    began = time.perf_counter()
    mllm = ps.build("mllm", num_devices, setup.num_microbatches)
    row["mllm seconds"] = time.perf_counter() - began
    return row | {"mllm makespan_ms": ps.simulate(mllm, setup.ends_shared(num_devices), links=setup.links).makespan}


def tessel_of(num_devices: int, seconds: float) -> Row:
    """What Tessel's search finds for as many devices in so many seconds."""
    setup = setup_of(num_devices, MICROBATCHES_A_DEVICE * num_devices)
    flow = tessel.flow_of(setup.ends_shared(num_devices), setup.links, num_devices)
    found = tessel.search(flow, seconds)
    return {
        "Tessel seconds": found.seconds,
        "Tessel ended": found.is_shortest,
        "Tessel tried": found.num_tried,
        "Tessel ways": found.num_ways,
        "Tessel makespan_ms": found.makespan(setup.num_microbatches),
    }


def rows_of(seconds: float) -> Iterator[Row]:
    """Of every number of devices; Tessel's search up to the first at which the time is too short."""
    row_of(2)  # which loads the compiled code
    goes_on = True
    for num_devices in PAPER:
        row = row_of(num_devices)
        if goes_on:
            row |= tessel_of(num_devices, seconds)
            goes_on = row["Tessel ended"]
        yield row


def found(method: str, setup: Setup) -> list[Run]:
    """The best of each placement, the shortest first; those with whole backwards have their gradients separated."""
    best: dict[str, Run] = {}
    for run in METHODS[method](setup, inf):
        shape = shape_of(run.placement)
        if shape not in best or run.makespan < best[shape].makespan:
            best[shape] = run
    runs = [separated(run) if run.is_whole else run for run in best.values()]
    return sorted(runs, key=lambda run: run.makespan)


def pictures() -> Iterator[tuple[str, ps.Timeline]]:
    """Figure 11: on four devices Tessel's schedule, and FlexPipe's on its best two placements."""
    setup = setup_of(DRAWN, DRAWN_MICROBATCHES)
    (tessel,) = METHODS["Tessel"](setup, inf)
    for run in (tessel, *found("FlexPipe", setup)[:2]):
        yield f"{run.method}: {run.placement}", run.timeline


def shape_of(placement: str) -> str:
    """Its name among those of the grid."""
    return placement.split(", ")[1]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "seconds of a search; X: fails"
    body = []
    for row in rows:
        paper = ["X" if seconds is None else f"{seconds:.2f}" for seconds in PAPER[row["devices"]]]
        body.append(
            [
                str(row["devices"]),
                *paper,
                tessel_words(row),
                *(f"{row[f'{m} seconds']:.2f}" for m in SEARCHED),
                f"{row['mllm seconds']:.3f}",
            ]
        )
    yield from table(
        ["devices", "Tessel", "Tessel-fast", "FlexPipe", "Tessel here", "FlexPipe's grid here", "ours", "mllm"], body
    )
    yield ""
    yield "what is found: ms of a replica's iteration, and how long devices stand idle"
    body = [
        [
            str(row["devices"]), f"{row['mllm makespan_ms']:.0f}",
            "" if row.get("Tessel makespan_ms") is None else f"{row['Tessel makespan_ms']:.0f}",
            *(
                f"{row[f'{m} makespan_ms']:.0f} {row[f'{m} bubble']:.1%} {shape_of(row[f'{m} placement'])}"
                for m in SEARCHED
            ),
        ]
        for row in rows
    ]  # fmt: skip
    yield from table(["devices", "mllm", "Tessel here", *SEARCHED], body)


def tessel_words(row: Row) -> str:
    """The seconds of its search; where they did not suffice, how much of it was done."""
    if "Tessel seconds" not in row:
        return "not tried"
    if row["Tessel ended"]:
        return f"{row['Tessel seconds']:.2f}"
    return f"X: {row['Tessel tried'] / row['Tessel ways']:.1%} in {row['Tessel seconds']:.0f}"


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of Tessel's search")
    given = parser.parse_args()
    if not given.show:
        save(given.out, "table5", list(rows_of(given.seconds)), limit=given.seconds)
        named = list(pictures())
        path = given.out / "figure11.svg"
        picture = to_svg([each for _, each in named], titles=[name for name, _ in named], width=960)
        path.write_text(picture, encoding="utf-8")
        print(f"picture: {path}")
    print("\n".join(lines(load(given.out, "table5"))))


if __name__ == "__main__":
    main()
