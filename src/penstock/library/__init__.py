"""The named schedules, each with its drawing in its docstring."""

from penstock.library.build import ASYNCHRONOUS, SCHEDULES, build

__all__ = ["ASYNCHRONOUS", "SCHEDULES", "build"]
