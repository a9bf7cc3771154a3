"""A trace of a run -> costs, how much slower it was than it should be, the causes, and what would help.

trace --> table of steps, messages --> network of the engine --> replay, measures --> causes, what-ifs --> page
"""

from penstock.analyze.causes import SlowdownCause
from penstock.analyze.run_analysis import RunAnalysis, analyze_trace
from penstock.analyze.what_if import WhatIf, predict

__all__ = ["RunAnalysis", "SlowdownCause", "WhatIf", "analyze_trace", "predict"]
