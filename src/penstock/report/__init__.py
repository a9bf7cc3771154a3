"""The report of a run under control: its story as plain values, and as one self-contained HTML page."""

from penstock.report.page import to_page
from penstock.report.run_story import RunStory

__all__ = ["RunStory", "to_page"]
