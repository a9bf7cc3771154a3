"""Builds the library of the engine's functions, where there is a C compiler (see `penstock.engine.compiled`)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup

# The package's own `__init__` imports numpy, which is not there where wheels are built.
package = ModuleType("penstock")
package.__path__ = [str(Path(__file__).parent / "src" / "penstock")]
sys.modules["penstock"] = package
from penstock.engine.compiled import FLAGS, source  # noqa: E402

written = Path("build", "core.c")
written.parent.mkdir(exist_ok=True)
written.write_text(source())
setup(
    ext_modules=[
        Extension(
            "penstock.engine._core",
            [str(written)],
            extra_compile_args=[*FLAGS],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
