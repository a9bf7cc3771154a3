"""All tables and figures one after the other.

    python -m experiments.amdp.all                what is simulated: four hours, or minutes with the results there
    python -m experiments.amdp.all --measured     tables 3 and 4 on emulated devices too
    python -m experiments.amdp.all --learning     and what is learnt: an hour of one core more

Of `figure7.py`, `rates.py`, `table5.py`, `mismatch.py` and `pays.py` what is there already is kept: move
`results/` away to begin anew.
"""

from __future__ import annotations

from experiments.common.command import options, run_all

SIMULATED = ("table1", "theorem1", "figure6", "figure8", "table3", "table4", "mismatch", "pays")
MEASURED = ("table3", "table4")
LEARNING = ("tuning", "figure7", "rates", "table5", "convergence", "defaults", "own_rates", "delay", "tentative")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--measured", action="store_true", help="tables 3 and 4 on emulated devices too")
    parser.add_argument(
        "--learning",
        action="store_true",
        help="learning rates, figure 7, table 5 and four minutes each of the last five",
    )
    given = parser.parse_args()
    runs = [[name, *(["--measured"] if given.measured and name in MEASURED else [])] for name in SIMULATED]
    runs += [[name] for name in LEARNING if given.learning]
    run_all("amdp", runs)


if __name__ == "__main__":
    main()
