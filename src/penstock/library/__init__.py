"""The named schedules, each with its drawing in its docstring."""

from penstock.library.build import SCHEDULES, build

__all__ = ["SCHEDULES", "build"]
