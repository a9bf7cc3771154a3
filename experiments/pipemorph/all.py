"""All figures and Table 2 one after the other, then the table of simulated against measured; not those of a GPU.

    python -m experiments.pipemorph.all                        a quarter of an hour
    python -m experiments.pipemorph.all --backend threads      forty minutes

Measured runs sleep most of their time; those that are not measured compute.
"""

from __future__ import annotations

from experiments.common.command import options, run_all

SIMULATED = (
    "figure1", "figure3", "figure5", "figure8", "figure14", "figure15", "figure16", "figure17", "figure18",
    "figure19", "figure20", "figure22", "table2", "memory", "reaction", "uneven",
)  # fmt: skip
MEASURED = (
    "figure5", "figure14", "figure15", "reaction", "figure17", "memory", "figure1", "uneven", "figure18", "figure22",
    "figure16", "figure3", "figure19", "table2",
)  # fmt: skip
ALWAYS_MEASURED = ("figure21", "moved")
"""Nothing of these is simulated. `moved` needs what `penstock lab` needs."""
ON_ONE_GPU = ("figure9", "figure10", "figure21_gpu")
"""Not run here: each needs a GPU."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--backend", choices=("simulate", "threads"), default="simulate")
    backend = parser.parse_args().backend
    runs = [[name, "--backend", backend] for name in (SIMULATED if backend == "simulate" else MEASURED)]
    if backend == "threads":
        runs += [[name] for name in (*ALWAYS_MEASURED, "table")]
    run_all("pipemorph", runs)


if __name__ == "__main__":
    main()
