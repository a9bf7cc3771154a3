"""Table 4: what it costs AMDP that every copy of a stage has the optimizer's state and steps (ZeRO off).

    python -m experiments.amdp.table4               simulated, ten seconds
    python -m experiments.amdp.table4 --measured    and on emulated devices, half a minute
    python -m experiments.amdp.table4 --show        what was found last

8 ranks, 4 pipelines. Without ZeRO each rank steps 4 stages at an update instead of one, and the summed gradient comes
back to the copies instead of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from experiments.amdp.command import command
from experiments.amdp.methods import Trial, trial_of
from experiments.amdp.setups import MODELS, Setup
from experiments.common.results import Row, find, table

PAPER: Mapping[str, tuple[float, float]] = {"GPT": (80.3, 83.7), "BERT": (82.7, 86.1)}
"""ktokens/s at d = 8, b = 128, without ZeRO and with it."""
BATCHES = (32, 128)


def trials() -> Iterator[tuple[Row, Trial]]:
    for model in MODELS:
        for batch in BATCHES:
            setup = Setup(model, 8, batch)
            for zero in (False, True):
                yield {"model": model, "batch": batch, "zero": zero}, trial_of("amdp", setup, zero)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "throughput of AMDP, 8 ranks (ktokens/s)"
    body = []
    for model in MODELS:
        for batch in BATCHES:
            found = [find(rows, model=model, batch=batch, zero=zero) for zero in (False, True)]
            if batch == 128:
                body.append([model, str(batch), "paper", *_cells(*PAPER[model])])
            for kind in ("simulated", "measured"):
                off, on = (row[kind] for row in found)
                if off is not None and on is not None:
                    body.append([model, str(batch), kind, *_cells(off, on)])
    yield from table(["", "b", "", "without ZeRO", "with ZeRO", "without it"], body)


def _cells(off: float, on: float) -> list[str]:
    return [f"{off:.1f}", f"{on:.1f}", f"{off / on - 1:+.1%}"]


if __name__ == "__main__":
    command("table4", __doc__, trials, lines)
