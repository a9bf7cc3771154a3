"""The tests here share fixtures with the tests of penstock, and run at night alone.

They are of experiments, benchmarks, the site, the project's words and the workflows.
"""

from __future__ import annotations

from tests.conftest import browser, one_thread

__all__ = ["browser", "one_thread"]
