"""Searches over starts: one interface, two engines.

>>> from onepass.experiments.search import ENGINES, Plan, Problem, Where, search
>>> sorted(ENGINES["local"])
['asha', 'bayesian-optimisation', 'pbt', 'random']
"""

from __future__ import annotations

from onepass.experiments.search import local, on_ray
from onepass.experiments.search.problem import BEST, Best, Found, Moment, Plan, Problem, Space, Trial, Where, best

ENGINES = {"local": local.SEARCHES, "ray": on_ray.SEARCHES}


def search(problem: Problem, plan: Plan, where: Where, engine: str = "local") -> Found:
    """Go on with a search, or begin it."""
    for name, table, asked in (("engine", ENGINES, engine), ("search", ENGINES["local"], plan.search)):
        if asked not in table:
            raise ValueError(f"{name} must be one of {', '.join(table)}, but got {asked!r}")
    for name in ("trials", "steps", "repetitions"):
        if getattr(plan, name) < 1:
            raise ValueError(f"{name} must be at least 1, but got {getattr(plan, name)}")
    if not problem.searched:
        raise ValueError("the space must have at least one range to search, but has only constants")
    return ENGINES[engine][plan.search](problem, plan, where)


__all__ = ["BEST", "ENGINES", "Best", "Found", "Moment", "Plan", "Problem", "Space", "Trial", "Where", "best", "search"]
