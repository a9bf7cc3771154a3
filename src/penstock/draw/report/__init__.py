"""The report of a run under control: its story as plain values, and as one self-contained HTML page."""

from penstock.draw.report.page import to_page
from penstock.draw.report.story import RunStory

__all__ = ["RunStory", "to_page"]
