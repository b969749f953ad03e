"""Many users, one machine: an engine whose scheduler serves a model and a cost model alike."""

from kvlab.serving.disaggregated import Handover, simulate_disaggregated
from kvlab.serving.engine import Engine, Event, EventKind, Listener, StepRecord
from kvlab.serving.executor import CostModelExecutor, Executor, ModelExecutor, StepSeconds
from kvlab.serving.log import EventLog, Histogram, Lifetime, Lifetimes, Served, Summary
from kvlab.serving.metrics import Metrics
from kvlab.serving.plan import Order, Plan, Policy
from kvlab.serving.request import FinishReason, Request, TokenRequest
from kvlab.serving.scheduler import Scheduler
from kvlab.serving.simulate import Replica, SimulatedRequest, simulate
from kvlab.serving.workload import Arrival, Lengths, Workload, arrivals, workload

__all__ = [
    "Arrival", "CostModelExecutor", "Engine", "Event", "EventKind", "EventLog", "Executor", "FinishReason", "Handover",
    "Histogram", "Lengths", "Lifetime", "Lifetimes", "Listener", "Metrics", "ModelExecutor", "Order", "Plan", "Policy",
    "Replica", "Request", "Scheduler", "Served", "SimulatedRequest", "StepRecord", "StepSeconds", "Summary",
    "TokenRequest", "Workload", "arrivals", "simulate", "simulate_disaggregated", "workload",
]  # fmt: skip
