"""Searches in one process: trials advance side by side, as the replicas of one population."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onepass.experiments.search.bayesian import bayesian
from onepass.experiments.search.memory import Memory
from onepass.experiments.search.problem import Found, Plan, Problem, Where, inside
from onepass.experiments.search.replicas import keep_best_of, ranked, trials_of
from onepass.population import Population
from onepass.progress import Progress
from onepass.starts import LogUniform, Uniform, seed_of

FACTOR = 4  # successive halving keeps one in so many
QUANTILE = 0.25  # of population-based training: the worst are replaced by copies of the best
RESAMPLED = 0.25  # how often a mutation draws a new value
FACTORS = (0.8, 1.2)  # and otherwise multiplies by one of these
LOOKS = 40  # how often, in a whole training, losses are looked at and paths are mutated


def random(problem: Problem, plan: Plan, where: Where) -> Found:
    """Independent trials, each trained to the end."""
    return _rounds(problem, plan, where, lambda population, memory: None)


def halving(problem: Problem, plan: Plan, where: Where) -> Found:
    """Successive halving: after 1, 4, 16 ... steps, the best quarter goes on.

    Li et al., *A System for Massively Parallel Hyperparameter Tuning*, MLSys 2020. Where ASHA promotes trials as they
    come, all are there at once here, and the best quarter is known.
    """
    ends = budgets(plan.steps)

    def best_go_on(population: Population, memory: Memory) -> None:
        if population.steps in ends[:-1]:
            order = ranked(problem.valid_losses(population))
            best = order[: max(1, len(order) // FACTOR)]
            population.keep(best)
            memory.numbers = [memory.numbers[i] for i in best.tolist()]

    return _rounds(problem, plan, where, best_go_on, stops=ends)


def population_based(problem: Problem, plan: Plan, where: Where) -> Found:
    """Population-based training: forty times, the worst quarter goes on as mutated copies of the best.

    Jaderberg et al., *Population Based Training of Neural Networks*, 2017; settings are Ray Tune's. Where values are
    tuned meanwhile, a mutation multiplies what tuning has reached by the ratio of the new value to the old one as this
    search sees it: that is the paper's rule.
    """

    def worst_are_replaced(population: Population, memory: Memory) -> None:
        if population.steps < plan.steps:
            sources = exploited(problem.valid_losses(population), seed_of(plan.seed, "sources", population.steps))
            population.copy(sources)
            mutate(problem, population, sources, memory.seen, seed_of(plan.seed, "mutations", population.steps))

    return _rounds(problem, plan, where, worst_are_replaced)


def budgets(steps: int) -> list[int]:
    """
    >>> budgets(4000)
    [1, 4, 16, 64, 256, 1024, 4000]
    """
    found = [1]
    while found[-1] * FACTOR < steps:
        found.append(found[-1] * FACTOR)
    return [*found, steps] if steps > 1 else [1]


def exploited(losses: Tensor, seed: int) -> Tensor:
    """What each path goes on from: itself, or for the worst quarter, anyone of the best.

    >>> exploited(torch.tensor([4.0, 1.0, torch.nan, 2.0]), seed=0).tolist()
    [0, 1, 1, 3]
    """
    order, sources = ranked(losses), torch.arange(len(losses))
    few = min(math.ceil(QUANTILE * len(losses)), len(losses) // 2)
    if few:
        generator = torch.Generator().manual_seed(seed)
        sources[order[-few:]] = order[torch.randint(few, (few,), generator=generator)]
    return sources


def mutate(problem: Problem, population: Population, sources: Tensor, seen: dict[str, Tensor], seed: int) -> None:
    """New values for the copies. ``seen``: values as this search knows them, without what tuning has done to them."""
    copies = (sources != torch.arange(len(sources))).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    now = population.values()
    for name, draw in problem.searched.items():
        old = seen[name][sources]
        new = old.clone()
        for r in copies.tolist():
            new[r] = mutated(float(old[r]), draw, generator)
        seen[name] = new
        now[name] = torch.where(new == old, now[name], now[name] * new / old)
    population.set_values({name: now[name] for name in problem.searched})


def mutated(value: float, draw: LogUniform | Uniform, generator: torch.Generator) -> float:
    """A new value from the range searched, or the old one times a factor, inside that range."""
    if float(torch.rand((), generator=generator)) < RESAMPLED:
        return draw.sample(generator)
    factor = FACTORS[int(torch.randint(len(FACTORS), (), generator=generator))]
    return inside(value * factor, draw)


# --- what they share ---


def _rounds(
    problem: Problem,
    plan: Plan,
    where: Where,
    between: Callable[[Population, Memory], None],
    stops: Sequence[int] = (),
) -> Found:
    """Train all that are left up to one stop after the other, with something done in between; saved at every stop."""
    memory = Memory.of(problem, plan, where)
    population = problem.population(len(memory.numbers), plan.seed, where)
    if memory.population is not None:
        population.load_state_dict(memory.population)
    memory.seen = memory.seen or _starts(population)
    bar = Progress(memory.work, _work(plan, stops)) if where.progress else None
    pause = max(1, plan.steps // LOOKS)
    for stop in sorted({*stops, *range(pause, plan.steps, pause), plan.steps}):
        if stop <= population.steps:
            continue
        memory.work += (stop - population.steps) * population.replicas
        problem.run(population, stop)
        memory.looked_at(population.steps, problem.test_losses(population))
        if bar is not None and bar.due(memory.work):
            bar.show(memory.work, problem.valid_losses(population))
        between(population, memory)
        memory.save(population, last=stop == plan.steps)
    if bar is not None:
        bar.close()
    return _found(problem, population, memory, where)


def _work(plan: Plan, stops: Sequence[int]) -> int:
    """Weight steps of all trials together; at each of the stops, the best go on."""
    total, trials, before = 0, plan.trials, 0
    for stop in stops or [plan.steps]:
        total, before = total + trials * (stop - before), stop
        trials = max(1, trials // FACTOR)
    return total


def _starts(population: Population) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in population.history.start.items()}


def _found(problem: Problem, population: Population, memory: Memory, where: Where) -> Found:
    trials = trials_of(problem, population, memory.numbers)
    keep_best_of(population, trials, where)
    return Found(trials, list(range(len(trials))), memory.course, memory.resumed)


SEARCHES: dict[str, Callable[[Problem, Plan, Where], Found]] = {
    "random": random,
    "asha": halving,
    "pbt": population_based,
    "bayesian-optimisation": bayesian,
}
