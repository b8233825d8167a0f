"""The planner: finds the fastest plan that fits, explains it, and finds how many GPUs a training needs."""

from meshwright.planner.api import plan
from meshwright.planner.result import Result
from meshwright.planner.sizing import Sizing, size

__all__ = ["Result", "Sizing", "plan", "size"]
