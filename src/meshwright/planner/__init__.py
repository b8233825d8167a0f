"""The planner: which plan is the fastest that fits, and why."""

from meshwright.planner.api import plan
from meshwright.planner.result import Result

__all__ = ["Result", "plan"]
