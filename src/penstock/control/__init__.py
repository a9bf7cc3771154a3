"""Straggler decisions: measurements in, reconfigurations out. No clock, thread or socket."""

from penstock.control.advice import Help, Obstacle, Unanswered
from penstock.control.candidate import Action, Candidate, Measured, candidates
from penstock.control.changes import Change, Detector, Sensitivity
from penstock.control.closed_loop_simulation import Rehearsal, Rehearsed, measured_events, rehearse, run_once
from penstock.control.compute import ComputeChange
from penstock.control.configuration import Configuration, Job, Prices
from penstock.control.controller import Controller
from penstock.control.decide import Decision, Scored, choose, predict, score
from penstock.control.errors import ControlError
from penstock.control.events import (
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
from penstock.control.link import Cause, LinkChange
from penstock.control.log_replay import replay
from penstock.control.orchestrator import Orchestrator
from penstock.control.reranking import Reranking, rerank
from penstock.control.trial import Verdict

__all__ = [
    "Action",
    "Candidate",
    "Cause",
    "Change",
    "ComputeChange",
    "Configuration",
    "ControlError",
    "Controller",
    "Decision",
    "Detector",
    "Dropped",
    "Event",
    "Help",
    "IterationEnded",
    "Job",
    "Link",
    "LinkChange",
    "LinkDown",
    "LinkUp",
    "Measured",
    "Obstacle",
    "Offered",
    "OpTimes",
    "Orchestrator",
    "Prices",
    "Rehearsal",
    "Rehearsed",
    "Reranking",
    "Scored",
    "Sensitivity",
    "Switched",
    "Transfers",
    "Unanswered",
    "Verdict",
    "candidates",
    "choose",
    "measured_events",
    "predict",
    "rehearse",
    "replay",
    "rerank",
    "run_once",
    "score",
]
