"""All figures one after the other, then the table of simulated against measured.

    python -m experiments.pipemorph.all                        a quarter of an hour
    python -m experiments.pipemorph.all --backend threads      twenty-five minutes

Measured runs sleep most of their time; those that are not measured compute.
"""

from __future__ import annotations

from experiments.common.command import options, run_all

SIMULATED = (
    "figure1", "figure3", "figure5", "figure8", "figure14", "figure15", "figure16", "figure17", "figure18",
    "figure19", "figure20", "figure22", "memory", "reaction", "uneven",
)  # fmt: skip
MEASURED = (
    "figure5", "figure14", "figure15", "reaction", "figure17", "memory", "figure1", "uneven", "figure18", "figure22",
    "figure16", "figure3", "figure19",
)  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--backend", choices=("simulate", "threads"), default="simulate")
    backend = parser.parse_args().backend
    runs = [[name, "--backend", backend] for name in (SIMULATED if backend == "simulate" else MEASURED)]
    if backend == "threads":
        runs += [["figure21"], ["table"]]
    run_all("pipemorph", runs)


if __name__ == "__main__":
    main()
