"""A story in plain words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.report import RunStory
from penstock.report.run_story import runs_of
from penstock.report.words import headline, more, seconds
from report_cases import decided, iteration, told

pytestmark = pytest.mark.unit


def test_one_late_link_is_told_in_one_sentence() -> None:
    calm = [iteration(n, 100, 0, None, 0.0, 0.1) for n in range(3)]
    slow = [iteration(n, 1100, 0, None, 60.0, 0.1) for n in range(3, 6)]
    after = [iteration(n, 150, 1, 1100, 60.0, 0.1) for n in range(6, 10)]
    story = told([*calm, *slow, *after], [decided(1, 4, 6)])
    assert story.lost == pytest.approx(7 * 1000)
    assert story.saved == pytest.approx(4 * 950)
    assert headline(story) == (
        "Iterations take 150 ms at the end, 100 at the start; link 0–1 was 60 ms late for 7 iterations; link 0–1 "
        "went by delegates and dispatch became dynamic after 3 iterations; 3.8 s of 7.0 s lost time was saved, by "
        "measured iterations."
    )


@pytest.mark.parametrize(
    ("story", "said"),
    [
        (
            told([iteration(n, 100, 0, None, 0.2) for n in range(5)]),
            "No link was late by 1 ms or more in 5 iterations.",
        ),
        (
            told([iteration(n, 100.1, 0, None, 10.0) for n in range(5)]),
            "Link 0–1 was 10 ms late for all 5 iterations; "
            "that cost next to nothing (0 ms), and nothing was changed.",
        ),
        (
            told([iteration(n, 200, 0, None, 30.0 + 20 * (n == 4)) for n in range(5)]),
            "Link 0–1 was 30 ms (at most 50) late for all 5 iterations; what runs was never changed; "
            "500 ms were lost, none of it saved.",
        ),
        (
            told([iteration(n, 200, 0, None, 30.0, 30.0, 40.0, 1.0) for n in range(5)]),
            "Links 0–1 and 1–2 were 30 to 40 ms late for all 5 iterations; "
            "what runs was never changed; 500 ms were lost, none of it saved.",
        ),
        (
            told(
                [iteration(n, 200, 0, None, 30.0 if n in (1, 9) else 0.0) for n in range(12)],
                [decided(1, 5, None, outcome="given up")],
            ),
            "Link 0–1 was 30 ms late 2 times, for 2 iterations in all; what runs was never changed; "
            "200 ms were lost, none of it saved.",
        ),
    ],
)
def test_other_runs_are_told_in_one_sentence_too(story: RunStory, said: str) -> None:
    assert headline(story) == said
    assert len(more(story)) == 3


def test_iterations_near_each_other_are_one_spell() -> None:
    assert runs_of([1, 2, 4, 9, 10], 3) == [[1, 2, 4], [9, 10]]
    assert runs_of([], 3) == []


@pytest.mark.parametrize(("ms", "said"), [(840, "840 ms"), (28_250, "28.2 s"), (128_000, "128 s"), (6e5, "10.0 min")])
def test_long_times_read_easily(ms: float, said: str) -> None:
    assert seconds(ms) == said


def test_a_run_that_became_slower_is_not_praised() -> None:
    calm = [iteration(n, 110, 0, None, 0.0, 0.1) for n in range(6)]
    slow = [iteration(n, 206, 1, 110, 5.0, 0.1) for n in range(6, 20)]
    change = replace(decided(1, 4, 6), measured_before=110.0, measured_after=206.0)
    said = headline(told([*calm, *slow], [change]))
    assert said.startswith("Iterations take 206 ms at the end, 110 before the last change")
    assert "the changes cost 1.3 s, by measured iterations" in said
    assert "saved" not in said


def test_what_could_not_be_measured_is_not_called_saved() -> None:
    changed = [iteration(n, 100, 1, None, 0.0, 0.1) for n in range(6)]
    late = [iteration(n, 530, 1, None, 120.0, 0.1) for n in range(6, 12)]
    story = told([*changed, *late], [decided(1, -1, 0)])
    assert story.saved is None
    assert "too few iterations ran under the same links before the change to measure what it saved" in headline(story)


def test_a_change_that_was_tried_and_taken_back_is_no_answer() -> None:
    calm = [iteration(n, 100, 0, None, 0.0) for n in range(6)]
    tried = [iteration(n, 130, 1, 100, 0.0) for n in range(6, 12)]
    after = [iteration(n, 100, 2, None, 0.0) for n in range(12, 20)]
    change = replace(decided(1, 4, 6), taken_back=True, verdict="it is slower")
    story = told([*calm, *tried, *after], [change, decided(2, 11, 12, "take back")])
    assert (
        "1 change of what runs was tried and taken back; the changes cost 180 ms, by measured iterations"
        in headline(story)
    )
    assert "1 of them taken back because measured iterations were no faster" in more(story)[0]
