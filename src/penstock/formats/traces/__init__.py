"""Traces of runs, as they were recorded elsewhere or by Penstock, read into one form."""

from penstock.formats.traces.reader import read_trace
from penstock.formats.traces.run_trace import NONE, RunTrace, Scope, TracedKind, TracedOp, TraceError, trace_of

__all__ = ["NONE", "RunTrace", "Scope", "TraceError", "TracedKind", "TracedOp", "read_trace", "trace_of"]
