"""The report of a run: its record and the story of its links as plain values, and as one self-contained HTML page."""

from penstock.report.page import to_page
from penstock.report.run_story import RunRecord, RunStory

__all__ = ["RunRecord", "RunStory", "to_page"]
