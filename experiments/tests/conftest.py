"""The tests of experiments and benchmarks share what the tests of penstock share. They run at night alone."""

from __future__ import annotations

from tests.conftest import one_thread

__all__ = ["one_thread"]
