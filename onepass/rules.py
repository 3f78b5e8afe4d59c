r"""Update rules: what one optimizer step does to one weight, as pure elementwise functions.

A rule is ``u, s' = update(h, w, g, s)``, and the weight then moves to ``w - u``:

* ``h``: the hyperparameters by name (``lr``, ``beta1``, ...) and the switches (``nesterov``, ...); a value may be a
  number or any tensor that broadcasts to ``w``;
* ``w``, ``g``: weight and training gradient;
* ``s``: the optimizer's state under torch's own keys, as it was *before* the step; a missing key means "not yet made";
* ``u``, ``s'``: the update, and the state after it. ``step`` is a plain number and is not differentiated.

Every rule equals its ``torch.optim`` twin to rounding, and is differentiable in everything: that is what
``torch.optim(..., differentiable=True)`` does not give. Adding a rule is one function and one line in ``RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Values = Mapping[str, Any]
State = Mapping[str, Any]
Update = Callable[[Values, Tensor, Tensor, State], tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class Rule:
    """An update function, and the raw space of each hyperparameter that can be tuned in it.

    ``beta1`` and ``beta2`` stand for the two numbers of a param group's ``betas``.

    Attributes:
        update: see above.
        tunable: name -> raw space (``hyperparameters.TRANSFORMS``).
        bounds: where the search stops by default, if not where ``hyperparameters.DEFAULT_BOUNDS`` says.
        moving_numbers: numbers in the state that depend on the hyperparameters, and so are differentiated too.
    """

    update: Update
    tunable: Mapping[str, str]
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    moving_numbers: tuple[str, ...] = ()

    def bounds_around(self, name: str, start: Tensor) -> tuple[float, float] | None:
        """This rule's own default bounds, widened to hold the start."""
        if name not in self.bounds:
            return None
        low, high = self.bounds[name]
        return min(low, float(start.min())), max(high, float(start.max()))


def sgd(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """``buf = momentum * buf + (1 - dampening) * (g + wd * w)``; ``u = lr * buf``, or Nesterov's look ahead."""
    d = _decayed(h, w, g)
    if _is_off(h["momentum"]):
        return h["lr"] * d, {}
    old = s.get("momentum_buffer")
    buf = d if old is None else h["momentum"] * old + _scaled(d, h["dampening"])
    direction = d + h["momentum"] * buf if h["nesterov"] else buf
    return h["lr"] * direction, {"momentum_buffer": buf}


def adam(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """Kingma and Ba (2015); ``amsgrad`` after Reddi et al. (2018)."""
    return _adam(h, w, g, s, decoupled=bool(h.get("decoupled_weight_decay", False)))


def adamw(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """Loshchilov and Hutter (2019): Adam with the decay taken out of the gradient."""
    return _adam(h, w, g, s, decoupled=True)


def _adam(h: Values, w: Tensor, g: Tensor, s: State, *, decoupled: bool) -> tuple[Tensor, dict[str, Any]]:
    t, _, m, v, shrink = _moments(h, w, g, s, decoupled=decoupled)
    state = {"step": t, "exp_avg": m, "exp_avg_sq": v}
    if h["amsgrad"]:
        v = torch.maximum(_or_zeros(s, "max_exp_avg_sq", w), v)
        state["max_exp_avg_sq"] = v
    denominator = _sqrt(v) / (1 - h["beta2"] ** t) ** 0.5 + h["eps"]
    return shrink + h["lr"] / (1 - h["beta1"] ** t) * m / denominator, state


def nadam(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """Dozat (2016), with torch's momentum schedule ``mu``."""
    t, d, m, v, shrink = _moments(h, w, g, s, decoupled=bool(h.get("decoupled_weight_decay", False)))
    mu = h["beta1"] * (1 - 0.5 * 0.96 ** (t * h["momentum_decay"]))
    mu_next = h["beta1"] * (1 - 0.5 * 0.96 ** ((t + 1) * h["momentum_decay"]))
    product = s.get("mu_product", 1.0) * mu
    denominator = _sqrt(v / (1 - h["beta2"] ** t)) + h["eps"]
    from_gradient = (1 - mu) / (1 - product) * d
    from_average = mu_next / (1 - product * mu_next) * m
    state = {"step": t, "exp_avg": m, "exp_avg_sq": v, "mu_product": product}
    return shrink + h["lr"] * (from_gradient + from_average) / denominator, state


def radam(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """Liu et al. (2020): no adaptive step until the second moment has been seen often enough."""
    t, _, m, v, shrink = _moments(h, w, g, s, decoupled=bool(h.get("decoupled_weight_decay", False)))
    beta2 = h["beta2"] if isinstance(h["beta2"], Tensor) else torch.tensor(h["beta2"], dtype=torch.float64)
    power, longest = beta2**t, 2 / (1 - beta2) - 1
    length = longest - 2 * t * power / (1 - power)
    rectified = length > 5
    # Where not rectified the root would be of a negative number: give it a harmless one, the `where` drops the result.
    length, longest = torch.where(rectified, length, 6.0), torch.where(rectified, longest, 7.0)
    scale = ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
    adaptive = scale * (1 - power) ** 0.5 / (_sqrt(v) + h["eps"])
    unit = torch.where(rectified, adaptive, torch.ones_like(adaptive))
    return shrink + h["lr"] * m / (1 - h["beta1"] ** t) * unit, {"step": t, "exp_avg": m, "exp_avg_sq": v}


def rmsprop(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """Hinton (2012), with torch's ``centered`` and ``momentum``."""
    d = _decayed(h, w, g)
    v = h["alpha"] * _or_zeros(s, "square_avg", w) + (1 - h["alpha"]) * d * d
    state = {"step": s.get("step", 0.0) + 1, "square_avg": v}
    if h["centered"]:
        mean = _or_zeros(s, "grad_avg", w)
        mean = mean + (1 - h["alpha"]) * (d - mean)
        state["grad_avg"] = mean
        v = v - mean * mean
    direction = d / (_sqrt(v) + h["eps"])
    if not _is_off(h["momentum"]):
        direction = h["momentum"] * _or_zeros(s, "momentum_buffer", w) + direction
        state["momentum_buffer"] = direction
    return h["lr"] * direction, state


def adagrad(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """Duchi et al. (2011), with torch's ``lr_decay``."""
    d = _decayed(h, w, g)
    t = s.get("step", 0.0) + 1
    total = _or_zeros(s, "sum", w) + d * d
    rate = h["lr"] / (1 + (t - 1) * h["lr_decay"])
    return rate * d / (_sqrt(total) + h["eps"]), {"step": t, "sum": total}


def adamax(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """Kingma and Ba (2015), section 7.1: Adam with the infinity norm."""
    d = _decayed(h, w, g)
    t = s.get("step", 0.0) + 1
    m = _or_zeros(s, "exp_avg", w)
    m = m + (1 - h["beta1"]) * (d - m)
    largest = torch.maximum(h["beta2"] * _or_zeros(s, "exp_inf", w), d.abs() + h["eps"])
    return h["lr"] / (1 - h["beta1"] ** t) * m / largest, {"step": t, "exp_avg": m, "exp_inf": largest}


_ADAM = {"lr": "log10", "beta1": "logit", "beta2": "log10-of-one-minus", "eps": "log10", "weight_decay": "log10"}

RULES: dict[str, Rule] = {
    "sgd": Rule(sgd, {"lr": "log10", "momentum": "logit", "dampening": "logit", "weight_decay": "log10"}),
    "adam": Rule(adam, _ADAM),
    "adamw": Rule(adamw, _ADAM, bounds={"weight_decay": (1e-6, 1.0)}),  # decoupled: it comes multiplied by lr
    "nadam": Rule(nadam, {**_ADAM, "momentum_decay": "log10"}, moving_numbers=("mu_product",)),
    "radam": Rule(radam, _ADAM),
    "rmsprop": Rule(
        rmsprop,
        {"lr": "log10", "alpha": "log10-of-one-minus", "eps": "log10", "weight_decay": "log10", "momentum": "logit"},
    ),
    "adagrad": Rule(adagrad, {"lr": "log10", "lr_decay": "log10", "weight_decay": "log10", "eps": "log10"}),
    "adamax": Rule(adamax, _ADAM),
}

OPTIMIZERS: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: RULES["sgd"],
    torch.optim.Adam: RULES["adam"],
    torch.optim.AdamW: RULES["adamw"],
    torch.optim.NAdam: RULES["nadam"],
    torch.optim.RAdam: RULES["radam"],
    torch.optim.RMSprop: RULES["rmsprop"],
    torch.optim.Adagrad: RULES["adagrad"],
    torch.optim.Adamax: RULES["adamax"],
}


def register(optimizer_class: type[torch.optim.Optimizer], rule: Rule) -> None:
    """Teach the tuner a third-party optimizer: ``onepass.register(Lion, Rule(lion, {"lr": "log10"}))``."""
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be an onepass.rules.Rule, but got {type(rule).__name__}")
    OPTIMIZERS[optimizer_class] = rule


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer. A subclass is not trusted to step like its parent: it has to be registered."""
    known = OPTIMIZERS.get(type(optimizer)) or vars(type(optimizer)).get("rule")
    if not isinstance(known, Rule):
        names = ", ".join(sorted(cls.__name__ for cls in OPTIMIZERS))
        raise ValueError(
            f"optimizer must be one of {names}, but got {type(optimizer).__name__}; "
            f"teach it with onepass.register({type(optimizer).__name__}, rule)"
        )
    return known


def _decayed(h: Values, w: Tensor, g: Tensor) -> Tensor:
    """The gradient with its sign for ``maximize`` and the weight decay that belongs in it."""
    d = -g if h.get("maximize", False) else g
    return d if _is_off(h["weight_decay"]) else d + h["weight_decay"] * w


def _moments(
    h: Values, w: Tensor, g: Tensor, s: State, *, decoupled: bool
) -> tuple[Any, Tensor, Tensor, Tensor, Tensor | float]:
    """What Adam's family shares: step count, gradient, both moments, and the decoupled part of the update."""
    shrink: Tensor | float = 0.0
    if decoupled:
        d = -g if h.get("maximize", False) else g
        if not _is_off(h["weight_decay"]):
            shrink = h["lr"] * h["weight_decay"] * w
    else:
        d = _decayed(h, w, g)
    m, v = _or_zeros(s, "exp_avg", w), _or_zeros(s, "exp_avg_sq", w)
    m = m + (1 - h["beta1"]) * (d - m)
    v = h["beta2"] * v + (1 - h["beta2"]) * d * d
    return s.get("step", 0.0) + 1, d, m, v, shrink


def _is_off(value: Any) -> bool:
    """A plain zero switches a term off, as in torch; a tensor never does."""
    return not isinstance(value, Tensor) and value == 0


def _scaled(d: Tensor, dampening: Any) -> Tensor:
    return d if _is_off(dampening) else (1 - dampening) * d


def _or_zeros(s: State, key: str, w: Tensor) -> Tensor:
    found = s.get(key)
    return torch.zeros_like(w) if found is None else found


def _sqrt(v: Tensor) -> Tensor:
    """The root, with slope 0 at 0: a weight that never had a gradient must not turn the whole hypergradient to NaN."""
    return v.clamp(min=torch.finfo(v.dtype).tiny).sqrt()
