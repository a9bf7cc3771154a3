"""The proof against random edits, 14,400 at night: each is refused by the name of an op, or runs to its end."""

from __future__ import annotations

import random

import pytest

import penstock as ps
import reference
from mutations import BASES, bases, mutants
from tiers import sample

pytestmark = pytest.mark.property

EACH = sample(300, 40)
"""Edits of each base; two bases of each of the library's schedules."""


def test_every_library_schedule_is_edited() -> None:
    assert set(BASES) == set(ps.library.SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ps.library.SCHEDULES)
def test_edits_are_refused_by_name_or_run_to_their_end(name: str) -> None:
    rng = random.Random(name)
    ran = refused = 0
    for base in bases(name):
        for edit, mutant in mutants(base, rng, EACH):
            error = reference.refusal(mutant)
            if error is not None:
                refused += 1
                assert not reference.is_valid(mutant), f"{edit}: refused, but it can run\n{error}\n{mutant}"
                assert error.op is not None, f"{edit}: the error names no op\n{error}"
                assert f"{error.op.short()} of stage {error.op.stage}" in str(error), f"{edit}: {error}"
                assert error.rank is not None, f"{edit}: the error names no rank\n{error}"
                _run_unproved(mutant)
                continue
            ran += 1
            assert reference.is_valid(mutant), f"{edit}: accepted, but it cannot run\n{mutant}"
            for dispatch in ("frozen", "dynamic"):
                timeline = ps.simulate(mutant, dispatch=dispatch, links=ps.Links(default=0.5))
                assert len(timeline.ops) == mutant.num_ops, f"{edit}, {dispatch}\n{mutant}"
    assert ran + refused == 2 * EACH
    assert ran > EACH // 20
    assert refused > EACH


def _run_unproved(mutant: ps.Schedule) -> None:
    """Who simulates without a proof gets a ScheduleError or a timeline, never a KeyError."""
    for dispatch in ("frozen", "dynamic"):
        try:
            ps.simulate(mutant, dispatch=dispatch)
        except ps.ScheduleError:
            continue


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_bounded_channels_block_as_in_the_reference(depth: int) -> None:
    rng = random.Random(depth)
    for base in bases("zb") + bases("zb-v"):
        for edit, mutant in mutants(base, rng, sample(200, 60)):
            sound = reference.is_covered(mutant) and reference.in_order(mutant)
            expected = sound and reference.run(mutant, depth) == mutant.num_ops
            error = reference.refusal(mutant, channel_depth=depth)
            assert (error is None) == expected, f"{edit}: {error}\n{mutant}"
