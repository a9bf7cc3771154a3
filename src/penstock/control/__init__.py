"""Straggler decisions: measurements in, reconfigurations out. No clock, thread or socket."""

from penstock.control.advice import Unanswered
from penstock.control.closed_loop_simulation import measured_events, rehearse, replay, run_once
from penstock.control.configuration import Configuration, Job, Prices
from penstock.control.controller import Controller
from penstock.control.decide import Action, Decision, Measured, candidates, predict
from penstock.control.events import (
    ControlError,
    Dropped,
    Event,
    IterationEnded,
    Link,
    LinkDown,
    LinkUp,
    Offered,
    OpTimes,
    Switched,
    Transfers,
)
from penstock.control.orchestrator import Orchestrator
from penstock.control.reranking import rerank
from penstock.control.trial import Verdict
from penstock.control.watches import Cause

__all__ = [
    "Action",
    "Cause",
    "Configuration",
    "ControlError",
    "Controller",
    "Decision",
    "Dropped",
    "Event",
    "IterationEnded",
    "Job",
    "Link",
    "LinkDown",
    "LinkUp",
    "Measured",
    "Offered",
    "OpTimes",
    "Orchestrator",
    "Prices",
    "Switched",
    "Transfers",
    "Unanswered",
    "Verdict",
    "candidates",
    "measured_events",
    "predict",
    "rehearse",
    "replay",
    "rerank",
    "run_once",
]
