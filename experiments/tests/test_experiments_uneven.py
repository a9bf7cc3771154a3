"""The experiment on uneven work: what is promised of any draw held, its page is of its results, and cells repeat."""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import penstock as ps
from experiments.common.readme import between
from experiments.common.results import named_in

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "experiments" / "uneven"


@pytest.fixture(scope="module")
def load() -> Any:
    return lambda name: importlib.import_module(f"experiments.uneven.{name}")


def test_a_captioner_s_stages_are_of_one_tower_each_and_cost_what_their_own_lengths_do(load: Any) -> None:
    captioned = load("captioned")
    assert captioned.stages_of([1.0] * 31, 4) == [range(8), range(8, 15), range(15, 23), range(23, 31)]
    costs = captioned.costs_of(ps.build("1f1b", 4, 4))
    assert costs.towers == ("images", "words", "words", "words")
    text, image = ({"images": [[]], "words": [[40]]}, {"images": [[400]], "words": [[40]]})
    assert costs.of(text).duration("F", 0, 0) == 0 < costs.of(image).duration("F", 0, 0)
    assert costs.of(text).duration("F", 1, 0) == costs.of(image).duration("F", 1, 0) > 0
    sizes = [captioned.sizes_of(number) for number in range(300)]
    assert {len(each.patches) for each in sizes} == {0, 1, 2, 3}
    assert max(max(each.patches, default=0) for each in sizes) <= captioned.SIDE**2
    assert all(1 <= each.num_words <= captioned.CONTEXT for each in sizes)


def test_the_page_has_the_tables_of_the_results(load: Any) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    tables = load("tables")
    assert tables.text() in page
    assert between(page, "missed").splitlines() == tables.missed().splitlines()
    assert named_in(tables.MISSED) == set(tables.NUMBERS)
    for script in ("simulated", "emulated", "real", "tables"):
        assert f"python -m experiments.uneven.{script}" in page
        assert f"python -m experiments.uneven.{script}" in load(script).__doc__


def test_multi_modal_aims_are_missed_where_the_page_says_so(load: Any) -> None:
    protocol, record = load("protocol"), load("record")
    spread = {}
    for cell in record.read_cells("towers").values():
        how, num_ranks, sigma, _ = cell["cell"]
        if how == "spread":
            moved, at_most = (fmean(column) for column in list(zip(*cell["draws"], strict=True))[1:])
            spread[num_ranks, sigma] = moved >= protocol.MULTI_MODAL
            assert (at_most < protocol.MULTI_MODAL) == ((num_ranks, sigma) in load("tables").MISSING)
    assert [each for each, met in spread.items() if met] == [(16, 1.0)]
    late = {
        tuple(cell["cell"]): [fmean(column) for column in zip(*cell["draws"], strict=True)]
        for cell in record.read_cells("late_towers").values()
    }
    assert len(late) == 24
    assert all(faster < protocol.MULTI_MODAL for faster, _ in late.values())
    assert max(late, key=lambda each: late[each][0]) == (16, 1.0, 5.0, 2)
    out_of_reach = {each[:3] for each, (_, at_most) in late.items() if at_most < protocol.MULTI_MODAL}
    assert out_of_reach == {(8, 0.6, 5.0), (8, 0.6, 10.0), (16, 0.6, 5.0)}


def test_no_draw_is_slower_than_arrival_with_known_lengths_and_none_in_the_mean_with_errors(load: Any) -> None:
    protocol, record = load("protocol"), load("record")
    for part in ("order", "bytes", "changed"):
        for cell in record.read_cells(part).values():
            assert len(cell["draws"]) == protocol.NUM_DRAWS
            assert min(value for draw in cell["draws"] for value in draw) >= 1
            assert all(draw[-1] >= draw[0] - 1e-4 for draw in cell["draws"])
    for cell in record.read_cells("errors").values():
        taken = [draw[0] for draw in cell["draws"]]
        assert sum(taken) <= len(taken)
        assert max(taken) <= protocol.WORST
    for part in ("assigned", "documents"):
        for cell in record.read_cells(part).values():
            assert min(draw[2 if part == "assigned" else 1] for draw in cell["draws"]) >= 1


def test_cells_are_measured_again_alike(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, record, simulated = (load(name) for name in ("protocol", "record", "simulated"))
    monkeypatch.setattr(protocol, "NUM_DRAWS", 1)
    monkeypatch.setattr(protocol, "DOCUMENT_DRAWS", 1)
    monkeypatch.setattr(simulated, "MOVES_S", 0.0)
    for part, cells in (
        ("order", protocol.ORDER),
        ("assigned", protocol.ASSIGNED),
        ("documents", protocol.DOCUMENTS),
    ):
        kept = record.read_cells(part)["0"]["draws"][0]
        found = simulated.PARTS[part][0](cells[0])[0]
        assert found[0] == pytest.approx(kept[0], abs=2e-4)
    (again,) = simulated.errors(protocol.ORDER[0])
    assert again == pytest.approx(record.read_cells("errors")["0"]["draws"][0], abs=2e-4)


def test_no_assignment_is_better_than_its_limits(load: Any) -> None:
    record = load("record")
    limits = record.read_cells("assigned_limits")
    for number, cell in record.read_cells("assigned").items():
        for (_, busiest, faster), (least, most) in zip(cell["draws"], limits[number]["draws"], strict=True):
            assert busiest >= least - 1e-4
            assert faster <= most + 1e-3


def test_a_cell_has_the_record_of_its_run_with_the_numbers_of_its_draws(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = load("record")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for number in (1, 0):
        record.add_cell("order", number, range(3), {"cell": ["zb", 8], "draws": [[1.0]] * 3})
    cells = record.read_cells("order")
    assert list(cells) == ["0", "1"]
    for cell in cells.values():
        assert set(cell) == {"commit", "command", "machine", "load", "seeds", "cell", "draws"}
        assert cell["seeds"] == [0, 1, 2]
