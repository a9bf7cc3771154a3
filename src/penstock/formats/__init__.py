"""Reading and writing schedules and timelines: native JSON (versioned), text, Perfetto."""

from penstock.formats.native import from_json, load, save, to_json

__all__ = ["from_json", "load", "save", "to_json"]
