"""The named schedules, each with its drawing in its docstring."""

from penstock.library.registry import ASYNCHRONOUS, SCHEDULES, build

__all__ = ["ASYNCHRONOUS", "SCHEDULES", "build"]
