"""How steps, windows and passes lie to one another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.asynchronous import Passes, usual_steps

pytestmark = pytest.mark.unit


@st.composite
def fitting(draw: st.DrawFn) -> Passes:
    """Passes whose windows fit."""
    microbatches, steps = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    whole = microbatches * steps
    windows = [n for n in range(1, whole + 1) if whole % n == 0] + [2 * whole, 3 * whole]
    found = Passes(microbatches, steps, draw(st.sampled_from(windows)))
    assert found.fits
    return found


@given(fitting(), st.integers(1, 60))
def test_a_run_is_whole_passes_and_windows(passes: Passes, steps: int) -> None:
    """Walked pass by pass: it ends as soon as enough steps are done and no window is open."""
    done = gathered = updates = 0
    while done < steps or gathered:
        assert passes.whole(steps, done, gathered) == passes.whole(steps)  # wherever it is asked
        closes = passes.closes(gathered)
        updates += max(1, passes.num_microbatches // passes.window) if closes else 0
        assert passes.updates_by(passes.steps - 1, gathered) == (
            max(1, passes.num_microbatches // passes.window) if closes else 0
        )
        done, gathered = done + passes.steps, passes.after(gathered)
    assert passes.whole(steps) == done
    assert updates * passes.window == done * passes.microbatches


@given(fitting(), st.integers(0, 9))
def test_an_update_has_the_rate_of_the_step_in_which_its_window_ends(passes: Passes, first: int) -> None:
    steps = [first + m // passes.microbatches for m in range(passes.num_microbatches)]
    size = passes.window_in_pass
    assert passes.rates(first, float) == [float(step) for step in steps[size - 1 :: size]]


@given(fitting(), st.data())
def test_shares_in_a_window_become_shares_in_a_step(passes: Passes, data: st.DataObject) -> None:
    """Losses that are all the same come out the same for each step, however uneven the microbatches are."""
    count = passes.num_microbatches
    samples = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    window = passes.window_in_pass
    shares = [samples[m] / sum(samples[m // window * window :][:window]) for m in range(count)]
    weighed = [share * weight for share, weight in zip(shares, passes.weights(samples), strict=True)]
    for start in range(0, count, passes.microbatches):
        assert sum(weighed[start : start + passes.microbatches]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("total", "window", "steps"),
    [
        (400, 8, 8),
        (100, 8, 10),
        (97, 8, 8),
        (30, 8, 10),
        (6, 8, 6),
        (2, 8, 2),
        (400, 1, 8),
        (400, 24, 9),
        (64, 256, 32),
    ],
)
def test_usual_passes(total: int, window: int, steps: int) -> None:
    """Near 8 steps, windows fit, and the run is whole passes where a number near 8 makes it so."""
    assert usual_steps(total, 8, window) == steps
    assert Passes(8, steps, window).fits
