"""The decision core: rules, priorities, memory caps; events in, decisions out."""

from penstock.dispatch.dispatcher import Dispatch, Dispatcher, FrozenDispatcher, Policy
from penstock.dispatch.graph import Graph, lower

__all__ = ["Dispatch", "Dispatcher", "FrozenDispatcher", "Graph", "Policy", "lower"]
