"""What a pipeline's calls must do besides gradients."""

from __future__ import annotations

import traceback

import pytest

from backends import Backend, processes
from runtime_checks import CHECKS, run


def run_checks(rank: int, ranks: int) -> dict[str, list[str]]:
    failed: dict[str, list[str]] = {}
    for name in CHECKS:
        failed[name] = []
        try:
            run(name, ranks)
        except Exception:
            failed[name].append(traceback.format_exc())
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_in_one_process(ranks: int) -> None:
    assert not Backend(1).wrong(run_checks, ranks)


@pytest.mark.parametrize("backend", [processes(4)])
def test_in_four_processes(backend: Backend) -> None:
    assert not backend.wrong(run_checks, 4)
