"""Case 19: a typing mistake in a text grid, such as 0F33 among four microbatches, is shown where it stands."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.schedule import Op

WITH_HEADER = str(ps.build("1f1b", 2, 4))
ROWS = "\n".join(WITH_HEADER.splitlines()[2:])
BARE = "\n".join(line.split("|")[1].strip() for line in ROWS.splitlines())
SEVERAL_STAGES = "\n".join(str(ps.build("zb-v", 2, 4)).splitlines()[2:])


def error_of(text: str) -> ps.ScheduleError:
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(ps.parse(text))
    return caught.value


def under_the_arrow(error: ps.ScheduleError) -> str:
    """The part of a row that the error's last line points at."""
    *_, row, arrow = str(error).splitlines()
    begin = arrow.index("^")
    return row[begin : begin + arrow.count("^")]


@pytest.mark.parametrize("text", [WITH_HEADER, ROWS, BARE])
@pytest.mark.parametrize(
    ("was", "typed", "said"),
    [
        ("F3", "0F33", "there are only 4 microbatches, 0 to 3"),
        ("F3", "F33", "there are only 4 microbatches, 0 to 3"),
        ("F3", "F4", "there are only 4 microbatches, 0 to 3"),
        ("B3", "B30", "there are only 4 microbatches, 0 to 3"),
        ("F3", "2F3", "there are only 2 stages, 0 to 1"),
        ("F3", "1F3", "stage 1 is placed on rank 1, so the op belongs there"),
        ("F3", "F2", "the op occurs twice, first at step 3"),
        ("F3", "Q3", "kind 'Q' is not one of F, B, I, W"),
        ("F3", "f3", "'f3' is not an op: write [stage]KIND<microbatch>, did you mean F3?"),
        ("F3", "F3,", "did you mean F3?"),
        ("B0", "BO", "did you mean B0?"),
        ("F3", "3F", "'3F' is not an op"),
        ("F3 B2", "F3B2", "put a space between F3 and B2"),
    ],
)
def test_a_cell_that_can_not_be_is_named_with_the_rule(text: str, was: str, typed: str, said: str) -> None:
    error = error_of(text.replace(was, typed, 1))
    assert said in str(error)
    assert under_the_arrow(error) in (typed, typed.removeprefix("0"))


@pytest.mark.parametrize(
    ("was", "typed", "said"),
    [
        ("0F3", "0F33", "line 1, column 46: there are only 4 microbatches, 0 to 3"),
        ("2F3", "2F33", "line 2, column 74: there are only 4 microbatches, 0 to 3"),
        ("3F3", "33F3", "there are only 4 stages, 0 to 3"),
        ("3F3", "4F3", "there are only 4 stages, 0 to 3"),
        ("3F3", "1F3", "stage 1 is placed on rank 1"),
        ("3W3", "3W2", "the op occurs twice"),
        ("3F3", "F3", "'F3' names no stage, and its rank hosts several"),
    ],
)
def test_so_is_a_cell_of_a_rank_with_several_stages(was: str, typed: str, said: str) -> None:
    error = error_of(SEVERAL_STAGES.replace(was, typed, 1))
    assert said in str(error)
    assert under_the_arrow(error) == typed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("rank 1", "rank 2"), "line 4, column 1: the header says 2 ranks"),
        (lambda text: text + "\nrank 2 | F0 B0", "line 5, column 1: the header says 2 ranks, the rows are for"),
        (lambda text: text + "\nrank 1 | F0 B0", "line 5, column 1: rank 1 is given twice"),
        (lambda text: "# mine\n" + text.rpartition("\n")[0], "line 2, column 1: the header says 2 ranks, the rows"),
        (lambda text: text.replace("4 micro", "5 micro"), "no row has an op of microbatch 4 (the schedule has 5)"),
    ],
)
def test_rows_and_counts_that_do_not_fit_the_header_are_named(change: Callable[[str], str], said: str) -> None:
    assert said in str(error_of(change(WITH_HEADER)))


def test_the_command_shows_the_line_and_the_arrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(SEVERAL_STAGES.replace("0F3", "0F33", 1))
    assert main(["check", "mine.txt"]) == 1
    said = capsys.readouterr().err
    assert "mine.txt is not valid: line 1, column 46: there are only 4 microbatches, 0 to 3" in said
    assert said.splitlines()[-1].strip() == "^^^^"


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "hanayo", "zb", "gpipe"])
def test_any_number_typed_wrong_is_found_in_rows_alone(name: str) -> None:
    rng = random.Random(19)
    for ranks, microbatches in ((2, 3), (3, 5), (4, 8)):
        schedule = ps.build(name, ranks, microbatches)
        for _ in range(6):
            rank = rng.randrange(ranks)
            step = rng.randrange(len(schedule.order[rank]))
            op = schedule.order[rank][step]
            typed = Op(op.kind, op.stage, op.microbatch + rng.choice([microbatches, 30]))
            lines = [line for line in str(schedule).splitlines() if line.startswith("rank ")]
            cells = lines[rank].split()
            place = [at for at, cell in enumerate(cells) if cell[0] != "."][step + 3]
            cells[place] = cells[place].replace(op.short(), typed.short())
            lines[rank] = " ".join(cells)
            error = error_of("\n".join(lines))
            assert f"there are only {microbatches} microbatches" in str(error)
            assert under_the_arrow(error) == cells[place]
