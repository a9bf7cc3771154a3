"""What the headlines of figures 12 and 13 owe to what is assumed: FlexPipe over Megatron-LM with other numbers.

    python -m experiments.flexpipe.assumptions      three minutes, with the choices that the two figures found

Of both methods (pp, dp, mbs) and what is computed again stay as they were; FlexPipe's schedule is searched anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.common.command import options
from experiments.common.results import Row, find, load, save, table
from experiments.flexpipe import RESULTS
from experiments.flexpipe.cluster import NODE_GB
from experiments.flexpipe.search import alternatives
from experiments.flexpipe.setups import MODELS
from experiments.flexpipe.sweep import chosen

HEADLINES = (("5B", "figure12", 1000), ("16.1B", "figure13", 512))
CHANGES: dict[str, dict[str, Any]] = {
    "as assumed": {},
    "the loss moves nothing": {"loss_bytes": 0.0},
    "the loss moves 52 bytes a logit, no kernel fused": {"loss_bytes": 52.0},
    "the embedding's gradient is not written out": {"embedding_bytes": 0.0},
    "half the network": {"node_gb": NODE_GB / 2},
    "twice the network": {"node_gb": 2 * NODE_GB},
}


def rows_of(folder: Path) -> Iterator[Row]:
    for model, figure, vocabulary in HEADLINES:
        rows = load(folder, figure)
        setups = {
            method: chosen(MODELS[model], find(rows, vocabulary=vocabulary, method=method)).setup
            for method in ("Megatron-LM", "FlexPipe")
        }
        for name, change in CHANGES.items():
            ms = {
                method: min(run.iteration_ms() for run in alternatives(method, replace(setup, **change)) if run.fits)
                for method, setup in setups.items()
            }
            yield {"model": model, "vocabulary": vocabulary, "change": name, **ms}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "FlexPipe as a multiple of Megatron-LM"
    names = [f"{model}, {vocabulary}K" for model, _, vocabulary in HEADLINES]
    body = []
    for change in CHANGES:
        of_models = [find(rows, model=model, change=change) for model, _, _ in HEADLINES]
        body.append([change, *(f"{row['Megatron-LM'] / row['FlexPipe']:.2f}" for row in of_models)])
    yield from table(["", *names], body)


def main() -> None:
    given = options(__doc__, RESULTS, show=True).parse_args()
    if not given.show:
        save(given.out, "assumptions", list(rows_of(given.out)))
    print("\n".join(lines(load(given.out, "assumptions"))))


if __name__ == "__main__":
    main()
