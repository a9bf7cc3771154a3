"""The decision core: rules, priorities, memory caps; events in, decisions out."""

from penstock.dispatch.dispatcher import Dispatcher, FrozenDispatcher
from penstock.dispatch.graph import Graph, lower
from penstock.dispatch.policy import Dispatch, Policy

__all__ = ["Dispatch", "Dispatcher", "FrozenDispatcher", "Graph", "Policy", "lower"]
