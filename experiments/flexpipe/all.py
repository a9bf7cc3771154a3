"""All tables and figures one after the other.

python -m experiments.flexpipe.all                what is simulated: an hour of one core
python -m experiments.flexpipe.all --measured     figures 12, 13 and 16 on emulated devices, as found last: minutes
"""

from __future__ import annotations

from experiments.common.command import options, run_all

SIMULATED = (
    "figure2",
    "figure12",
    "figure13",
    "figure14",
    "figure15",
    "figure16",
    "table5",
    "assumptions",
    "guessed_towers",
)
MEASURED = ("figure12", "figure13", "figure16")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--measured", action="store_true", help="only run what was found last on emulated devices")
    given = parser.parse_args()
    run_all(
        "flexpipe", [[name, "--measured"] for name in MEASURED] if given.measured else [[name] for name in SIMULATED]
    )


if __name__ == "__main__":
    main()
