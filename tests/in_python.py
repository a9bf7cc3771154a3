"""As on a machine without a C compiler: the engine's functions run as Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.engine import compiled


@contextmanager
def in_python() -> Iterator[None]:
    """Within it nothing runs as C."""
    compiled.compiled.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_library", lambda: None)
        yield
    compiled.compiled.cache_clear()
