"""The text grid: what it looks like, what it forgives, and what it refuses and where."""

from __future__ import annotations

import re

import pytest

import penstock as ps
from penstock.schedule import Op, parse_op

pytestmark = pytest.mark.unit

GRID = """\
schedule 1f1b: 2 ranks, 2 stages, 3 microbatches
pipeline 0: stages on ranks 0 1
rank 0 | F0 F1 .  B0 F2 B1 .  B2
rank 1 | .  F0 B0 F1 B1 F2 B2"""


def test_the_grid_of_the_docstring() -> None:
    assert str(ps.build("1f1b", 2, 3)) == GRID


def test_bubbles_comments_blanks_and_alignment_are_free() -> None:
    loose = """
        # by hand
        schedule 1f1b: 2 ranks, 2 stages, 3 microbatches

        pipeline 0: stages on ranks 0 1
        rank 1|F0 B0 F1 B1    F2 . . B2 .
        # rank 0 comes last here
        rank 0   | F0 F1 B0 F2 0B1 B2
    """
    assert ps.parse(loose) == ps.build("1f1b", 2, 3)


@pytest.mark.parametrize("limit", [1, 2.5, 0.1 + 0.2, 1e-7, 2**31, 1e300, 12345678.9])
def test_memory_limits_survive_to_the_last_digit(limit: float) -> None:
    schedule = ps.Schedule("x", ps.Placement(((0,),)), ((Op("F", 0, 0), Op("B", 0, 0)),), (0,), limit)
    assert ps.parse(str(schedule)) == schedule


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_a_memory_limit_is_a_number_above_0(limit: float) -> None:
    with pytest.raises(ps.ScheduleError, match="max_in_flight is"):
        ps.Schedule("x", ps.Placement(((0,),)), ((),), (0,), limit)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "F0 B0 F1 B1 F2 B2",
            "F0 B0 F1 B1 F2 2F0junk",
            "line 4, column 28: '2F0junk' is not an op: write [stage]KIND<microbatch>",
        ),
        ("F0 F1", "F0 F٣", "line 3, column 13: 'F٣' is not an op"),
        ("rank 1 |", "rank 0 |", "line 4, column 1: rank 0 is given twice"),
        ("rank 1 |", "rank 2 |", "line 4, column 1: the header says 2 ranks, the rows are for ranks [0, 2]"),
        ("rank 1 |", "rank one |", "line 4, column 1: expected 'pipeline K: ...' or 'rank R | ...' (or"),
        ("2 ranks,", "two ranks,", "line 1, column 1: expected 'schedule NAME: R ranks, S stages, N microbatches'"),
        ("2 stages,", "3 stages,", "line 1, column 1: the header says 3 stages, pipeline 0 places 2"),
        ("ranks 0 1", "ranks 0 2", "line 1, column 1: pipeline 0 names rank 2, but there are 2 ranks"),
        (
            "ranks 0 1",
            "ranks 0 1, microbatches 0 1",
            "line 1, column 1: each of the 3 microbatches must be in one pipeline's list, as in 'pipeline 0: ",
        ),
        ("pipeline 0", "pipeline 1", "line 1, column 1: pipelines must be numbered from 0, got [1]"),
        (
            "pipeline 0: stages on ranks 0 1\n",
            "",
            "line 1, column 1: no line says where stages lie; add one below, like 'pipeline 0: stages on ranks 0 1'",
        ),
        ("schedule 1f1b:", "schedule a/b:", "schedule name 'a/b': use letters, digits and ._+- only"),
    ],
)
def test_refusals_name_the_line_and_the_column(old: str, new: str, message: str) -> None:
    text = GRID.replace(old, new, 1)
    assert text != GRID
    with pytest.raises(ps.ScheduleError) as caught:
        ps.parse(text)
    assert str(caught.value).startswith(message)


def test_a_rank_with_several_stages_needs_the_stage() -> None:
    text = "schedule x: 1 rank, 2 stages, 1 microbatch\npipeline 0: stages on ranks 0 0\nrank 0 | 0F0 F0"
    with pytest.raises(ps.ScheduleError, match="column 14: 'F0' names no stage, and its rank hosts several"):
        ps.parse(text)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment"])
def test_no_text_is_no_schedule(text: str) -> None:
    with pytest.raises(ps.ScheduleError, match="the text holds no 'schedule NAME:"):
        ps.parse(text)


def test_ops_are_read_strictly() -> None:
    assert parse_op("12F3") == Op("F", 12, 3)
    assert parse_op("W7", default_stage=2) == Op("W", 2, 7)
    for wrong in ("", "F", "2F", "F0 ", " F0", "F-1", "2F0\n", "FF0", "f0", "1.0F2"):
        with pytest.raises(ValueError, match="is not an op"):
            parse_op(wrong, 0)


def test_a_schedule_that_deadlocks_still_prints_and_parses() -> None:
    text = GRID.replace("F0 B0 F1", "F1 B0 F0")
    schedule = ps.parse(text)
    assert ps.parse(str(schedule)) == schedule


def test_rows_alone_are_a_schedule() -> None:
    for name, ranks in (("1f1b", 4), ("gpipe", 1), ("zb-v", 4), ("interleaved-1f1b", 2), ("zb-h2", 3)):
        made = ps.build(name, ranks, 8)
        rows = "\n".join(line for line in str(made).splitlines() if line.startswith("rank "))
        read = ps.parse(f"# mine\n\n{rows}\n")
        assert read.name == "grid"
        assert (read.order, read.placement, read.num_microbatches) == (made.order, made.placement, 8)
        ps.check(read)
    two = ps.parse("pipeline 0: stages on ranks 1 0\nrank 0 | F0 B0\nrank 1 | F0 B0")
    assert two.placement.pipelines == ((1, 0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0 | 0F0 1F0\nrank 1 | 1F0", "line 2, column 10: stage 1 stands on ranks 0 and 1: rows alone"),
        ("rank 0 | 0F0 2F0", "the cells name stages [0, 2]: stages are numbered from 0"),
        (
            "rank 0 | F0\nrank 1 | 2F0",
            "line 2, column 10: there are only 2 stages, 0 to 1; where one cell names its stage, as 2F0 does, all do",
        ),
    ],
)
def test_rows_that_say_too_little_are_refused(text: str, message: str) -> None:
    with pytest.raises(ps.ScheduleError) as caught:
        ps.parse(text)
    assert message in str(caught.value)


def test_rows_that_do_not_name_their_ranks_are_those_of_ranks_0_1_2() -> None:
    named = ps.parse("rank 0 | . F0 F1 B0 B1\nrank 1 | F0 B0 F1 B1")
    assert ps.parse(". F0 F1 B0 B1\n\n# the second rank\n  F0 B0 F1 B1") == named
    stages = ps.parse("rank 0 | 0F0 1F0 1B0 0B0")
    assert ps.parse("0F0 1F0 1B0 0B0") == stages
    head, _, rows = str(named).partition("rank 0 |")
    assert ps.parse(head + "F0 F1 B0 B1\nF0 B0 F1 B1") == ps.parse(head + "rank 0 |" + rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank 0 | F0 B0\nF0 B0", "line 2, column 1: some rows name their rank and this one does not"),
    ],
)
def test_a_row_is_either_of_cells_alone_or_names_its_rank(text: str, said: str) -> None:
    with pytest.raises(ps.ScheduleError, match=re.escape(said)):
        ps.parse(text)
