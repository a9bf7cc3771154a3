"""The text grid of every library schedule, so that a change of order is seen and meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import penstock as ps

pytestmark = pytest.mark.golden

SIZES: dict[str, list[tuple[int, int, dict]]] = {
    "gpipe": [(1, 2, {}), (4, 6, {})],
    "1f1b": [(1, 2, {}), (4, 3, {}), (4, 8, {})],
    "interleaved-1f1b": [(2, 4, {}), (4, 8, {}), (2, 4, {"num_stages": 6}), (4, 8, {"backward": "split"})],
    "zb-h1": [(1, 2, {}), (4, 3, {}), (4, 8, {})],
    "zb-h2": [(2, 3, {}), (4, 8, {})],
    "zb-v": [(1, 3, {}), (2, 4, {}), (4, 3, {}), (4, 8, {})],
    "looped-bfs": [(1, 2, {}), (2, 3, {}), (4, 2, {}), (2, 4, {"num_stages": 6})],
    "v-half": [(1, 3, {}), (2, 4, {}), (3, 5, {}), (4, 8, {})],
    "v-min": [(1, 3, {}), (2, 4, {}), (3, 5, {}), (4, 8, {})],
    "dualpipe": [(2, 4, {}), (4, 8, {})],
    "dualpipe-v": [(1, 2, {}), (2, 5, {}), (4, 8, {})],
    "pipedream": [(1, 2, {}), (4, 8, {}), (3, 5, {"window": 1})],
    "pipedream-2bw": [(1, 2, {}), (4, 8, {}), (3, 8, {"window": 3})],
    "spectrain": [(4, 8, {}), (3, 5, {"window": 1})],
    "xpipe": [(4, 8, {}), (3, 6, {"window": 2})],
    "vnag": [(4, 8, {}), (3, 5, {"window": 1})],
    "distmm": [(2, 3, {}), (4, 6, {"gather_every": 2}), (5, 6, {"branches": [3, 1, 1]})],
    "chimera": [(2, 4, {}), (4, 8, {}), (4, 8, {"backward": "split"}), (4, 6, {})],
    "hanayo": [(2, 3, {}), (4, 4, {"waves": 1}), (4, 8, {"waves": 1, "backward": "split"}), (4, 4, {})],
    "bitpipe": [(2, 4, {}), (4, 8, {}), (4, 4, {"backward": "split"})],
    "vchimera": [(2, 4, {}), (4, 8, {}), (4, 4, {"backward": "split"})],
    "mllm": [(1, 2, {}), (2, 3, {}), (4, 6, {})],
    "amdp": [(2, 4, {}), (4, 6, {}), (4, 8, {"b": 1.0}), (8, 16, {})],
    "zb": [(4, 12, {}), (4, 12, {"warmup": [9, 6, 3, 1]}), (4, 8, {"warmup": [4, 3, 2, 1], "max_in_flight": 4})],
}


@pytest.mark.parametrize("name", ps.library.SCHEDULES)
def test_grid(name: str, golden: Callable[[str, str], None]) -> None:
    schedules = [ps.build(name, ranks, microbatches, **options) for ranks, microbatches, options in SIZES[name]]
    golden(f"library/{name}.txt", "\n\n".join(map(str, schedules)) + "\n")


@pytest.mark.parametrize("name", ps.library.SCHEDULES)
def test_the_docstring_draws_the_schedule(name: str) -> None:
    """What a drawing shows of each row is how the row begins, bubbles aside; a second one shows the row's pairs."""
    function = ps.library.SCHEDULES[name]
    plain, *with_pairs = str(function.__doc__).split("With `overlap`")
    options = {"zb": {"warmup": [5, 3, 1]}, "distmm": {"gather_every": 2}}.get(name, {})
    microbatches = {
        "gpipe": 3,
        "zb-h2": 8,
        "zb": 8,
        "looped-bfs": 3,
        "dualpipe": 8,
        "v-half": 4,
        "v-min": 4,
        "mllm": 3,
        "chimera": 4,
        "hanayo": 2,
    }.get(name, 6)
    for text, given in (
        (plain, options),
        *((each, {**options, "overlap": True}) for each in with_pairs if "rank 0" in each),
    ):
        lines = [line.split("|", 1)[1] for line in text.splitlines() if line.strip().startswith("rank ")]
        drawn = [[cell for cell in line.replace("...", "").split() if cell != "."] for line in lines]
        pairs = {tuple(cell.split("+")) for cells in drawn for cell in cells if "+" in cell}
        drawn = [[op for cell in cells for op in cell.split("+")] for cells in drawn]
        if name == "mllm":
            drawn = [_by_stage(rank, cells, len(drawn) + 1) for rank, cells in enumerate(drawn)]
        schedule = function(len(drawn), microbatches, **given)
        assert pairs <= {(str(one), str(other)) for one, other in schedule.pairs}
        for rank, cells in enumerate(drawn):
            stages = schedule.stages_of(rank)
            row = [op.short() if len(stages) == 1 else str(op) for op in schedule.order[rank]]
            assert row[: len(cells)] == cells, f"rank {rank}: {' '.join(row[: len(cells) + 2])}"


def _by_stage(rank: int, cells: list[str], head: int) -> list[str]:
    """Cells that name the shared stages by letters (E and H, e and h backwards), as ops."""
    kinds = {"E": "0F", "e": "0B", "H": f"{head}F", "h": f"{head}B", "F": f"{rank + 1}F", "B": f"{rank + 1}B"}
    return [kinds[cell[0]] + cell[1:].removesuffix("----->") for cell in cells]
