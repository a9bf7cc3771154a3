"""Progress for the user: a bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

LINES, ITERATIONS = 20, 200
"""Lines over the whole run if there is no terminal: of steps, and of emulated iterations."""


class ProgressView:
    """Shows steps. `quiet` shows nothing. Everything goes to stderr, since stdout is for results."""

    def __init__(self, first: int, total: int, quiet: bool) -> None:
        self._quiet = quiet
        self._total = total
        self._every = max(1, (total - first) // LINES)
        self._bar = None if quiet or not sys.stderr.isatty() else _bar()
        if self._bar is not None:
            self._task = self._bar.add_task("training", total=total, completed=first, shown="")
        self._began = time.monotonic()
        self._num_decisions = 0
        self._shown = first

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def step(self, step: int, loss: float, speed: float, bubble: float, unit: str = "tokens") -> None:
        """Shows that `step` (from 1) is done."""
        shown = f"loss {loss:.3f}  {speed:,.0f} {unit}/s  bubble {bubble:.0%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, shown=shown)
        elif step // self._every > self._shown // self._every or step == self._total:
            self._shown = step
            self.say(f"step {step}/{self._total}  {shown}  {time.monotonic() - self._began:.0f} s")

    def iteration(self, number: int, measured: float, simulated: float, plan: int) -> None:
        """Shows that an emulated iteration (from 1) is done."""
        shown = f"{measured:.1f} ms  simulated {simulated:.1f}  plan {plan}"
        if self._bar is not None:
            self._bar.update(self._task, completed=number, shown=shown)
        elif number % max(1, self._total // ITERATIONS) == 0 or number == self._total:
            self.say(f"iteration {number}/{self._total}  {shown}")

    def decisions(self, made: Sequence[Mapping[str, Any]]) -> None:
        """Shows those decisions that were not shown before."""
        for each in made[self._num_decisions :]:
            number, iteration, action = each["number"], each["iteration"] + 1, each["action"]
            self.say(f"decided {number} after iteration {iteration}, {action}: {each['reason']}")
        self._num_decisions = len(made)

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Progress:
    # Imported here: only rank 0 shows anything, and only a terminal a bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
    )
