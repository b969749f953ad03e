"""Many users, one machine: an engine whose scheduler serves a model and a cost model alike."""

from kvlab.serving.engine import Engine, Event, EventKind, Listener, StepRecord
from kvlab.serving.executor import CostModelExecutor, Executor, ModelExecutor, StepSeconds
from kvlab.serving.request import FinishReason, Request, TokenRequest
from kvlab.serving.scheduler import Order, Plan, Policy, Scheduler

__all__ = [
    "CostModelExecutor", "Engine", "Event", "EventKind", "Executor", "FinishReason", "Listener", "ModelExecutor",
    "Order", "Plan", "Policy", "Request", "Scheduler", "StepRecord", "StepSeconds", "TokenRequest",
]  # fmt: skip
