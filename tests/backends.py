"""The backends of a test: all ranks in this process, or a process for each.

    @pytest.mark.parametrize("backend", backends(4))
    def test_a_grouped_loop(backend: Backend) -> None:
        assert not backend.wrong(run_all)

A function is called with the rank, once in each process. The processes of a backend start once for each call, so a
function goes through all of its cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from processes import run_ranks_to_end


@dataclass(frozen=True)
class Backend:
    """Where the ranks of a test run.

    Attributes:
        num_processes: how many processes there are. With one, all ranks run in the process of the test.
    """

    num_processes: int

    def values(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns in each process. A process that fails fails the test."""
        if self.num_processes == 1:
            torch.set_num_threads(1)  # as in processes of their own: sums differ with the number
            return [function(0, *args)]
        outcomes = run_ranks_to_end(self.num_processes, function, *args)
        return [o.value for o in outcomes]

    def wrong(self, function: Callable[..., dict[str, list[str]]], *args: Any) -> list[str]:
        """All texts that the function returns, by the name of a case, in all processes."""
        values = self.values(function, *args)
        assert all(values), "no case ran"
        return [
            f"rank {rank}, {case}: {text}"
            for rank, found in enumerate(values)
            for case, texts in found.items()
            for text in texts
        ]


def processes(num: int) -> Any:
    """A parameter: the backend of so many processes."""
    return pytest.param(Backend(num), id=f"{num} processes", marks=[pytest.mark.multiproc, pytest.mark.slow])


def backends(num: int) -> list[Any]:
    """Parameters: the backend of one process, and that of so many."""
    return [pytest.param(Backend(1), id="one process"), processes(num)]
