"""What a person sees while a run goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 20
"""Lines over the whole run where there is no terminal."""


class ProgressView:
    """Shows steps. `quiet` shows nothing; everything goes to stderr, which leaves stdout to results."""

    def __init__(self, first: int, total: int, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._total = total
        self._every = max(1, (total - first) // LINES)
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("training", total=total, completed=first, shown="")
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def step(self, step: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        """Shows that `step` (from 1) is done."""
        shown = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  bubble {bubble:.0%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, shown=shown)
        elif step % self._every == 0 or step == self._total:
            self.say(f"step {step}/{self._total}  {shown}  {time.monotonic() - self._began:.0f} s")
            sys.stderr.flush()

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
