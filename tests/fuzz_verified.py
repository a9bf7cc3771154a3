"""The fuzzer's runs with `pipe.verify` before the first step of each pipeline.

Programs that keep the contract must pass. What is compared afterwards, step by step, shows that nothing of it lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import penstock as ps
from fuzz_cases import Case, Outcome, Shape, draw, run
from fuzz_runs import run_case
from penstock.passes.reduce import REDUCE

MIXES_SAMPLES = ("used in some microbatches", "a second use in some microbatches")
"""Blocks whose path is chosen by a number of a microbatch, so that its samples see one another."""


def keeps_the_contract(seed: int, shape: Shape | None = None) -> Case | None:
    """A drawn program that `verify` takes and that keeps the contract. None if the seed draws another one."""
    case = draw(seed, shape)
    schedule = case.build()
    if schedule.updates is not None or schedule.graph.registered or case.listed:
        return None
    return None if any(name.endswith(MIXES_SAMPLES) for name in case.blocks) else case


@contextmanager
def verified() -> Iterator[None]:
    """Inside, the first step of each pipeline is verified."""
    step, seen = ps.Pipeline.step, set()

    def verify_first(self: Any, inputs: Any, targets: Any = None, **options: Any) -> Any:
        kinds = {each.kind for each in self.schedule.graph.registered}
        if id(self) not in seen and self.schedule.updates is None and kinds <= {REDUCE}:
            seen.add(id(self))
            self.verify(inputs, targets)
        return step(self, inputs, targets, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ps.Pipeline, "step", verify_first)
        yield


def run_verified(case: Case) -> Outcome:
    """A run in each of several processes."""
    return verified_run(case, processes=True)


def verified_run(case: Case, processes: bool = False) -> Outcome:
    with verified():
        try:
            return run_case(case) if processes else run(case, None)
        except ps.VerifyError as error:
            return Outcome("false alarm", str(error))
