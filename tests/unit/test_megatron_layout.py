"""Layout strings of Megatron's: those that people train with are read, written and judged; mistakes get a caret."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main
from penstock.formats.megatron_layout import MegatronLayout
from penstock.schedule import ScheduleError
from penstock.tune.errors import TuneError
from penstock.tune.layout import LayerTimes, better_layout, judge_layout

pytestmark = [pytest.mark.unit]

# From public training recipes: the string, the pipeline ranks it is for, its stages, and its blocks.
IN_USE = [
    ("Et*4|(t*4|)*14tmL", 4, 16, 61),
    ("Et*4|(tttt|)*14tmL", 2, 16, 61),
    ("Et|(tt|)*30mL", 16, 32, 61),
    ("Et|(tt|)*30L", 8, 32, 61),
    ("Et*3|(tt|)*29,m|L", 16, 32, 61),
    ("Et*3|(tt|)*29m|L", 16, 32, 61),
    ("Et*3|(tt|)*29|L", 16, 32, 61),
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8, 40, 80),
    ("Ett|(tt|)*6L", 4, 8, 14),
    ("Et|t|(tt|)*29tL", 8, 32, 61),
    ("Et*16|t*16|t*16|t*12,m,L", 2, 4, 60),
    ("E,t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4,L", 8, 8, 32),
    ("Et|(t|)*30tL", 8, 32, 32),
    ("Et*4|(t*7|)*5t*8|tmL", 8, 8, 48),
    ("Et*12|t*11|t*11|t*11L", 4, 4, 45),
    ("Et*15|t*15|t*16|t*15L", 4, 4, 61),
    ("Et*8|t*8|t*8|t*8|t*8|t*8|t*8|t*5L", 8, 8, 61),
    ("Ettt|(tttttt|)*2,(ttttt|)*2,(tttttt|)*2,tttttL", 4, 8, 42),
    ("E|(ttt|)*14,L", 8, 16, 42),
    ("Et|(tt|)*6,L", 4, 8, 13),
]
MISTAKES = [
    ("Et|x|L", 4, "'x' is not part of a layout"),
    ("Et|(tt|*3L", 4, "this group is not closed"),
    ("Et|tt)*3|L", 6, "no group is open here"),
    ("Et|((tt)*2|)*3L", 5, "a group in a group, which Megatron misreads"),
    ("Et|(tt|)L", 8, "a group says how often it is repeated"),
    ("*3Et|L", 1, "there is nothing before it to repeat"),
    ("Et*2*2|L", 5, "there is nothing before it to repeat"),
    ("Et|()*2|L", 6, "there is nothing before it to repeat"),
    ("Et*0|L", 3, "repeat at least once"),
    ("E(t|)*999999L", 6, "more than 100,000 layers"),
]
NO_MODELS = {
    "t|L": "E is there 0 times",
    "E|t|tLL": "L is there 2 times",
    "tE|L": "layers go E, then every t, then every m, then L",
    "|Et|L": "the first stage has the embedding",
    "Et|L|": "the last one the loss",
    "Et|m|mL": "every m is in one stage",
    "": "E is there 0 times",
}
TIMES = LayerTimes({"t": 1.0, "E": 0.2, "m": 1.3, "L": 1.4})


@pytest.mark.parametrize(("text", "ranks", "stages", "blocks"), IN_USE, ids=lambda value: str(value)[:24])
def test_strings_in_use_are_read_and_written(text: str, ranks: int, stages: int, blocks: int) -> None:
    layout = MegatronLayout.parse(text)
    layout.check_ranks(ranks)
    assert (len(layout.stages), sum(layout.counts)) == (stages, blocks)
    assert MegatronLayout.parse(str(layout)) == layout
    judged = judge_layout(layout, ranks, 2 * ranks, TIMES)
    each = [sum(TIMES.forward[letter] for letter in stage) for stage in layout.stages]
    busy = [3 * 2 * ranks * sum(each[rank::ranks]) for rank in range(ranks)]
    assert judged.step.busy == pytest.approx(busy)
    assert judged.step.makespan >= max(busy) - 1e-9


def test_what_the_documentation_spells_out() -> None:
    stages = MegatronLayout.parse("Et*3|(tt|)*29,m|L").stages
    assert stages == ("Ettt", *["tt"] * 29, "m", "L")
    assert MegatronLayout.parse("E||t|L").stages == ("E", "", "t", "L")
    assert MegatronLayout.parse(" E t |*3 (t, t|)*2 L").stages == (
        "Et", "", "", "tt", "tt", "L",
    )  # fmt: skip


@given(st.lists(st.integers(0, 9), min_size=2, max_size=24), st.integers(0, 2))
def test_what_is_written_reads_back(counts: list[int], num_m: int) -> None:
    *before, last = ("t" * count for count in counts)
    layout = MegatronLayout((f"E{before[0]}", *before[1:], f"{last}{'m' * num_m}L"))
    assert MegatronLayout.parse(str(layout)) == layout


def test_a_mistake_has_a_caret_below_it() -> None:
    for text, column, why in MISTAKES:
        with pytest.raises(ScheduleError, match="layout: ") as caught:
            MegatronLayout.parse(text)
        said = str(caught.value).splitlines()
        assert said[0].startswith(f"layout: {why}")
        assert said[1:] == [f"  {text}", f"  {' ' * (column - 1)}^"]
        assert (caught.value.line, caught.value.column) == (1, column)
    for text, why in NO_MODELS.items():
        with pytest.raises(ScheduleError, match=why):
            MegatronLayout.parse(text)


def test_stages_that_ranks_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(ScheduleError, match="3 stages do not spread evenly over 2 ranks"):
        MegatronLayout.parse("E|t|L").check_ranks(2)
    with pytest.raises(ScheduleError, match="m is in stage 1: Megatron has it in the last stage of its rank only"):
        MegatronLayout.parse("Et|m||L").check_ranks(2)
    assert judge_layout(MegatronLayout.parse("E|t|t|L"), 2, 3, TIMES).step.makespan > 0


def test_times_that_make_no_sense_are_refused() -> None:
    for forward, backward, why in [
        ({"x": 1.0}, 2.0, "'x' is no layer of a layout"),
        ({"t": -1.0}, 2.0, "t takes -1.0"),
        ({"L": 1.0}, 2.0, "give the time of a block"),
        ({"t": 1.0}, float("nan"), "the backward takes nan times"),
    ]:
        with pytest.raises(TuneError, match=why):
            LayerTimes(forward, backward)


@pytest.mark.slow
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.data(),
    st.fixed_dictionaries({letter: st.floats(0.1, 3.0) for letter in "EtmL"}),
)
def test_a_better_layout_is_never_slower_nor_fuller(
    ranks: int, chunks: int, data: st.DataObject, forward: dict[str, float]
) -> None:
    counts = data.draw(st.lists(st.integers(0, 4), min_size=ranks * chunks, max_size=ranks * chunks))
    stages = ["t" * count for count in counts]
    stages[-1] += "m" * data.draw(st.integers(0, 1)) + "L"
    layout = MegatronLayout((f"E{stages[0]}", *stages[1:]))
    times = LayerTimes(forward)
    before, after = judge_layout(layout, ranks, 2 * ranks, times), better_layout(layout, ranks, 2 * ranks, times)
    assert after.step.makespan <= before.step.makespan
    assert max(after.step.peak_activations) <= max(before.step.peak_activations)
    assert sum(after.layout.counts) == sum(counts)
    assert judge_layout(after.layout, ranks, 2 * ranks, times) == after
    after.layout.check_ranks(ranks)


@pytest.mark.parametrize("num_ranks", [8, pytest.param(16, marks=pytest.mark.nightly)])
def test_an_idle_stage_is_filled(num_ranks: int) -> None:
    """The longer is one that people train with."""
    num = 2 * num_ranks
    better = better_layout(MegatronLayout.parse(f"Et*3|(tt|)*{num - 3}|L"), num_ranks, num, TIMES)
    assert str(better.layout) == f"Et|(tt|)*{num - 2}L"


def _ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["layout", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_at_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _ran(capsys, "Et*15|t*15|t*16|t*15L", "--ranks", "4", "--times", "t=1,L=1.4", "--json")
    found: dict[str, Any] = json.loads(out)
    assert code == 0
    assert found["better"]["makespan"] < found["judged"]["makespan"]
    assert MegatronLayout.parse(found["better"]["layout"]).counts == (15, 16, 16, 14)
    code, out, err = _ran(capsys, "Et|tL", "--ranks", "2", "--times", "t=1,E=0,L=0")
    assert "nothing found: none of the layouts tried, 2,000 at most, has a shorter step" in out
    assert err == "looking for a better one among at most 2,000 layouts ...\n"
    code, _, err = _ran(capsys, "Et|tL", "--ranks", "2", "--times", "t=fast")
    assert (code, "'t=fast' is not LETTER=MS" in err) == (2, True)
    code, _, err = _ran(capsys, "Et|(t", "--ranks", "2")
    assert (code, err.splitlines()[-1]) == (1, "     ^")
