"""Whether a tuned step takes as long as was predicted: predicted beside measured, in alternation.

    python benchmarks/tune/run.py --rounds 3 --out FILE.json

For each setting a round measures layers and messages afresh, predicts the step, and then runs the schedule for real
through the launcher and the runtime. Rounds of the settings alternate. Of the steps those count in which ranks and
other programs together did not outnumber the cores; a round with enough of them is quiet. One that is not stays in
the count of rounds and is left out of the medians, unless none was quiet; rounds are added until there are enough
quiet ones, within a bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.library import build
from penstock.runtime import partition
from penstock.train.settings import Settings
from penstock.tune.device import Clock, num_devices, others
from penstock.tune.job import run_job
from penstock.tune.meter import Measurements, Meter, NeededProfile, prepare_together
from penstock.tune.predict import predict
from penstock.tune.search import TuneCandidate
from penstock.tune.space import Shape, TunePlan
from penstock.tune.tuned_model import TunedModel, tuned_model
from penstock.tune.verify import measured_of, trial_task

MODEL = "tiny"
QUIET = 0.1
"""Cores that other programs may take from the ranks."""

LOOK = 0.5
"""Seconds over which we look how busy the machine is."""

MOST_ROUNDS = 4
"""Times as many rounds as asked for, at most, in search of quiet ones."""


@dataclass(frozen=True)
class Setting:
    """A schedule on some ranks, in each of some replicas; microbatches of one size, as many in each replica."""

    schedule: str
    pp: int
    microbatch_size: int
    num_microbatches: int
    dp: int = 1

    @property
    def num_ranks(self) -> int:
        """Of all replicas."""
        return self.pp * self.dp


SETTINGS = (
    Setting("1f1b", 1, 4, 4),
    Setting("1f1b", 2, 4, 4),
    Setting("zb-h1", 2, 2, 8),
    Setting("interleaved-1f1b", 2, 4, 4),
    Setting("chimera", 2, 4, 4),
    Setting("1f1b", 1, 4, 2, dp=2),
)


def run(
    rounds: int = 5,
    steps: int = 20,
    seconds: float = 1.0,
    settings: Sequence[Setting] = SETTINGS,
    patience: float = 60.0,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Predicts and runs each setting.

    Args:
        rounds: quiet ones wanted of each setting.
        steps: timed of each run. seconds: of measuring layers.
        patience: seconds to wait before each round for a moment in which nothing else runs.
        out: where what was found so far is written after every round.

    Returns:
        A row for each setting, with medians over its rounds.
    """
    base = Settings(preset=MODEL, microbatches=1, ranks=1, threads=1)
    model = tuned_model(base)
    raw: dict[Setting, list[dict[str, Any]]] = {setting: [] for setting in settings}
    rows: list[dict[str, Any]] = []
    for number in range(rounds * MOST_ROUNDS):
        left = [setting for setting in settings if len(_quiet(raw[setting])) < rounds]
        for setting in left if number % 2 == 0 else left[::-1]:
            _await_quiet(patience)
            here = record()  # before the round, which is a load of its own
            found = _round(setting, base, model, steps, seconds) | {name: here[name] for name in ("commit", "load")}
            raw[setting].append(found)
            rows = [_row(each, measured) for each, measured in raw.items() if measured]
            if out is not None:
                save_summary(out, {**record(), "model": MODEL, "rows": rows})
            print(
                f"{setting.schedule} pp {setting.pp} dp {setting.dp}, microbatches of {setting.microbatch_size}: "
                f"{found['predicted_ms']:.1f} ms predicted, {found['measured_ms']:.1f} measured, others kept "
                f"{found['other_programs_cores'] or 0:.2f} cores busy",
                file=sys.stderr,
                flush=True,
            )
    return rows


def _round(setting: Setting, base: Settings, model: TunedModel, steps: int, seconds: float) -> dict[str, Any]:
    schedule = build(setting.schedule, setting.pp, setting.num_microbatches)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        meter = Meter(model, base, Measurements(Path(name)), seconds)
        need = NeededProfile(setting.microbatch_size, setting.num_ranks, False)
        prepare_together([(meter, [need])], [setting.num_ranks])
    profile, transfer = meter.profiles[need], meter.transfers[setting.num_ranks]
    cut = partition([sum(row) for row in zip(profile.f, profile.b)], schedule.num_stages)
    prediction = predict(schedule, cut, profile, transfer, setting.dp, num_devices(base))
    shape = Shape(setting.pp, setting.dp, setting.microbatch_size, setting.num_microbatches)
    candidate = TuneCandidate(shape, TunePlan(setting.schedule, schedule), tuple(cut), False)
    answer = run_job([trial_task(candidate, base, steps)], setting.num_ranks, 1)[0]
    measured = measured_of([answer])
    return {
        "predicted_ms": prediction.step,
        "predicted_makespan_ms": prediction.makespan,
        "predicted_update_ms": prediction.update,
        "measured_ms": measured.step,
        "measured_makespan_ms": measured.makespan,
        "ratio": prediction.step / measured.step,
        "predicted_bytes": [memory.total for memory in prediction.memory],
        "measured_bytes": list(measured.peak_bytes),
        "quiet": measured.quiet,
        "num_undisturbed": measured.undisturbed,
        "other_programs_cores": measured.others,
        "cut": [len(layers) for layers in cut],
        "steps_ms": list(measured.steps),
        "measured_ops_ms": answer.ranks[0]["ops"],
        "profile": msgspec.to_builtins(profile),
        "transfer": msgspec.to_builtins(transfer),
    }


def _await_quiet(patience: float) -> None:
    """Returns when other programs rest, or after `patience` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = Clock.now()
        time.sleep(LOOK)
        busy = others([Clock.now().since(before)])
        if busy is None or busy <= QUIET:
            return


def _quiet(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in rounds if each["quiet"]]


def _row(setting: Setting, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counted = _quiet(rounds) or rounds
    return {
        **vars(setting),
        "num_rounds": len(rounds),
        "num_quiet": len(_quiet(rounds)),
        "predicted_ms": median(each["predicted_ms"] for each in counted),
        "measured_ms": median(each["measured_ms"] for each in counted),
        "ratio": median(each["ratio"] for each in counted),
        "off": median(abs(each["ratio"] - 1) for each in counted),
        "worst": max(abs(each["ratio"] - 1) for each in counted),
        "predicted_bytes": median(max(each["predicted_bytes"]) for each in counted),
        "measured_bytes": median(max(each["measured_bytes"]) for each in counted),
        "ratios": [each["ratio"] for each in rounds],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The medians, as Markdown."""
    lines = [
        "| schedule | pp x dp | microbatches | predicted ms | measured ms | ratio | off, median | worst "
        "| predicted MiB | measured MiB | quiet rounds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['schedule']} | {row['pp']} x {row['dp']} "
            f"| {row['num_microbatches']} of {row['microbatch_size']} "
            f"| {row['predicted_ms']:.1f} | {row['measured_ms']:.1f} | {row['ratio']:.3f} | {row['off']:.1%} "
            f"| {row['worst']:.1%} "
            f"| {row['predicted_bytes'] / 2**20:.1f} | {row['measured_bytes'] / 2**20:.1f} "
            f"| {row['num_quiet']} of {row['num_rounds']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="quiet ones that each setting is to have")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring layers, in a round")
    parser.add_argument("--patience", type=float, default=60.0, help="most seconds to wait for a quiet moment")
    parser.add_argument("--setting", type=int, nargs="+", default=range(1, len(SETTINGS) + 1))
    parser.add_argument("--out", type=Path, help="written after every round")
    given = parser.parse_args()
    settings = [SETTINGS[number - 1] for number in given.setting]
    print(table(run(given.rounds, given.steps, given.seconds, settings, given.patience, given.out)))


if __name__ == "__main__":
    main()
