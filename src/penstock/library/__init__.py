"""The named schedules, each with its drawing in its docstring."""

from penstock.library.registry import ASYNCHRONOUS, SCHEDULES, build, options_of_each

__all__ = ["ASYNCHRONOUS", "SCHEDULES", "build", "options_of_each"]
