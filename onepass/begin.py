"""From a population's arguments to its method and its first moment."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from onepass.batches import fingerprint
from onepass.entries import expanded
from onepass.estimator import how_far
from onepass.guard import Guard
from onepass.hyperparameters import TRANSFORMS, checked_bounds, default_bounds, in_domain
from onepass.method import Method
from onepass.replicas import Limits, Named, State, Weights
from onepass.rules import OPTIMIZERS, RULES, Rule, rule_of
from onepass.sensitivity import FAR
from onepass.snapshot import named_values
from onepass.stack import Stack
from onepass.starts import draw, seed_of
from onepass.tuner import HyperOptimizer

Start = Mapping[str, Any]

# How torch computes a step, or what it begins with; no part of a rule.
OTHER_MATTERS = ("foreach", "fused", "capturable", "differentiable", "initial_accumulator_value")
Bounds = Mapping[str, tuple[float, float]]


def chosen_rule(rule: Any) -> Rule:
    """By name, by optimizer class, or as it is."""
    if isinstance(rule, Rule):
        return rule
    found = (
        RULES.get(rule.lower()) if isinstance(rule, str) else OPTIMIZERS.get(rule) if isinstance(rule, type) else None
    )
    if found is None:
        got = repr(rule) if isinstance(rule, (str, type)) else type(rule).__name__
        raise ValueError(
            f"rule must be one of {sorted(RULES)}, a torch optimizer class or an onepass.Rule, but got {got}"
        )
    return found


def default_values(rule: Rule) -> dict[str, Any]:
    """What the optimizer of this rule does unless told otherwise, under the names that rules use."""
    for cls, known in OPTIMIZERS.items():
        if known is rule:
            parameters = inspect.signature(cls).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
            return named_values({name: value for name, value in defaults.items() if name not in OTHER_MATTERS})
    return {}


def starting_values(rule: Rule, start: Start, scale: Start, replicas: int, seed: int) -> tuple[dict[str, Any], Named]:
    """Switches and constants that all replicas share, and columns of what differs between them."""
    if not isinstance(start, Mapping):
        raise ValueError(f"start must map names to values or distributions, but got {type(start).__name__}")
    given = {**start, **dict(zip(("beta1", "beta2"), start.get("betas", ()), strict=False))}
    given.pop("betas", None)
    known = {**dict.fromkeys(rule.tunable), **default_values(rule)}
    for argument, names, allowed in (("start", given, known), ("scale", scale, rule.tunable)):
        for name in names:
            if name not in allowed:
                raise ValueError(f"names in {argument} must be among {sorted(allowed)}, but got {name!r}")
    shared, columns = {**default_values(rule)}, {}
    shared.pop("lr", None)  # torch has a default for it, which nobody should rely on
    for name, value in given.items():
        shared.pop(name, None)
        if isinstance(value, bool) or value is None:
            shared[name] = value
        elif isinstance(value, (int, float)):
            shared[name] = float(value)
        else:
            columns[name] = _column(name, value, replicas, seed)
    for name in rule.tunable:
        if name not in shared and name not in columns:
            raise ValueError(
                f"start must have {name!r}, but got {sorted(given)}; "
                f"give it a value, or a range such as onepass.LogUniform(1e-6, 1e-1)"
            )
        value = torch.as_tensor(columns.get(name, shared.get(name)))
        if not bool((value >= 0).all() & value.isfinite().all()):
            raise ValueError(f"start[{name!r}] must be finite and at least 0, but got {value.min():g}")
    if shared.get("nesterov") and (_is_zero("momentum", shared, columns) or not _is_zero("dampening", shared, columns)):
        raise ValueError("nesterov must come with a momentum and without dampening")
    return shared, columns


def _is_zero(name: str, shared: Mapping[str, Any], columns: Named) -> bool:
    return name not in columns and shared.get(name) == 0


def _column(name: str, value: Any, replicas: int, seed: int, of: str = "start") -> Tensor:
    if hasattr(value, "sample"):
        return draw(value, seed, name, replicas)
    try:
        column = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        column = torch.empty(0)
    if column.shape != (replicas,):
        raise ValueError(
            f"{of}[{name!r}] must be a number, onepass.LogUniform, onepass.Uniform or {replicas} numbers, "
            f"but got {value!r}"
        )
    return column.unsqueeze(1).clone()


def _factor(name: str, by: Any, replicas: int, seed: int) -> Tensor:
    return _column(name, [float(by)] * replicas if isinstance(by, (int, float)) else by, replicas, seed, of="scale")


def tuned_names(rule: Rule, tune: Sequence[str] | None, shared: Mapping[str, Any], columns: Named) -> tuple[str, ...]:
    """Those asked for, or every one whose start lies inside its domain."""
    if isinstance(tune, str):
        raise ValueError(f"tune must be a tuple of names, but got the string {tune!r}")
    starts: dict[str, Any] = {name: columns.get(name, shared.get(name)) for name in rule.tunable}
    if tune is None:
        return tuple(name for name, start in starts.items() if in_domain(start, rule.tunable[name]))
    names = expanded(tune)
    for name in names:
        if name not in rule.tunable:
            raise ValueError(f"names in tune must be among {sorted(rule.tunable)}, but got {name!r}")
        space = rule.tunable[name]
        if not in_domain(starts[name], space):
            lowest = float(torch.as_tensor(starts[name]).min())
            raise ValueError(f"{name} cannot be tuned from {lowest:g} in {space} space; {TRANSFORMS[space].cure}")
    return tuple(dict.fromkeys(names))


def limits_of(rule: Rule, name: str, start: Tensor, bounds: Bounds) -> Limits:
    """Each replica's own: default bounds are widened to hold its start, and nobody else's."""
    if name in bounds:
        low, high = checked_bounds(name, start, rule.tunable[name], bounds[name])
        return Limits(start, torch.full_like(start, low), torch.full_like(start, high))
    low, high = rule.bounds.get(name) or default_bounds(name, rule.tunable[name])
    return Limits(start, start.clamp(max=low), start.clamp(min=high))


def set_up(
    stack: Stack,
    rule: Rule,
    *,
    replicas: int,
    start: Start,
    tune: Sequence[str] | None,
    per_element: Sequence[str],
    scale: Start,
    bounds: Bounds,
    hyper_optimizer: HyperOptimizer,
    guard: Guard | None,
    restart: bool,
    seed: int,
    estimator: str | None,
    lookback: int | None,
    **options: Any,
) -> tuple[Method, State]:
    """The method, and all replicas before their first step. The guard's memory begins with the first batch."""
    shared, columns = starting_values(rule, start, scale, replicas, seed)
    names = tuned_names(rule, tune, shared, columns)
    for argument, asked in (("per_element", per_element), ("bounds", [n for n in bounds if n not in scale])):
        for name in asked:
            if name not in names:
                raise ValueError(f"names in {argument} must be among those tuned, {list(names)}, but got {name!r}")
    for name in {*names, *scale} & set(shared):
        columns[name] = torch.full((replicas, 1), float(shared.pop(name)), dtype=torch.float64)
    weights, buffers = stack.start(seed, replicas)
    for name in per_element:
        columns[name] = columns[name].to(weights.dtype).expand_as(weights).clone()
    raw = {name: TRANSFORMS[rule.tunable[name]].to_raw(columns[name]) for name in names}
    factors = {name: _factor(name, by, replicas, seed_of(seed, "scale")) for name, by in scale.items()}
    for name in factors:
        if name in names:
            raise ValueError(f"scale must not move what is tuned, but got {name!r} in both")
    limits = {name: limits_of(rule, name, columns[name], bounds) for name in (*names, *factors)}
    hyper = hyper_rules(hyper_optimizer, raw)
    far = [name for name in FAR if name in names]
    steps = options["unroll"] is not None or restart  # hypergradients through real ones, that are taken only once
    estimator, lookback = how_far(estimator, lookback, far=bool(far) and not steps and not per_element)
    options |= {"estimator": estimator, "lookback": lookback}
    now = Weights(weights, buffers, {"step": torch.zeros(replicas, 1, dtype=weights.dtype)})
    guard = guard if "lr" in names else None  # without a learning rate to lower, going back would only repeat itself
    method = Method(stack=stack, rule=rule, switches=shared, tune=names, guard=guard, hyper=hyper, **options)
    state = State(
        now=now,
        raw=raw,
        fixed={name: column for name, column in columns.items() if name not in names},
        factors=factors,
        limits=limits,
        hyper={name: {"step": torch.zeros(replicas, 1, dtype=torch.float64)} for name in names},
        health=None,
        point=None,
        window=[],
        begin=now if restart else None,
        sensitivities={n: {"weights": torch.zeros_like(weights)} for n in far if estimator == "whole-run"},
        age=torch.zeros(replicas, 1, dtype=torch.float64),
        path=torch.zeros(replicas, 1, dtype=torch.float64),
    )
    return method, state


def hyper_rules(make: HyperOptimizer, raw: Named) -> dict[str, tuple[Rule, dict[str, Any]]]:
    """The hyper-optimizer as a rule, so that replicas can be at different steps of it."""
    if not raw:
        return {}
    optimizer = make(list(raw.values()))
    rule = rule_of(optimizer)
    found: dict[str, tuple[Rule, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        settings = named_values(group)
        found |= {name: (rule, settings) for name, tensor in raw.items() if any(tensor is p for p in group["params"])}
    if set(found) != set(raw):
        raise ValueError(f"hyper_optimizer must move all of {list(raw)}, but it moves only {list(found)}")
    return found


def made_by(method: Method, state: State, **arguments: Any) -> dict[str, Any]:
    """What a checkpoint has to agree with, in words that an error message can show."""
    settings = {name: (rule.update.__name__, str(values)) for name, (rule, values) in method.hyper.items()}
    stack = method.stack
    return {
        **arguments,
        "rule": method.rule.update.__name__,
        "switches": str(dict(method.switches)),
        "tune": list(method.tune),
        "interval": method.interval,
        "lookback": method.lookback,
        "through_state": method.through_state,
        "unroll": method.unroll,
        "estimator": method.estimator,
        "curvature": method.curvature,
        "clip_norm": method.clip_norm,
        "guard": str(method.guard),
        "hyper_optimizer": str(settings),
        "model": str({n: tuple(s) for n, s in zip(stack.names, stack.shapes, strict=True)}),
        "starts": fingerprint(x for x in tree_leaves(state) if isinstance(x, Tensor)),
    }
