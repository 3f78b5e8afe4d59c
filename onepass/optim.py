"""Torch optimizers whose hyperparameters may be tensors: one learning rate per weight, if you like.

They step by the very rules that the tuner differentiates. A tensor hyperparameter must broadcast to every weight of its
group; ``per_element`` makes the groups for one value per weight.

>>> model = torch.nn.Linear(3, 2)
>>> optimizer = SGD(per_element(model.parameters(), lr=0.1), momentum=0.9)
>>> optimizer.param_groups[0]["lr"].shape
torch.Size([2, 3])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onepass.rules import RULES, Rule, State, Values
from onepass.snapshot import named_values

Number = float | Tensor


class _RuleOptimizer(torch.optim.Optimizer):
    rule: ClassVar[Rule]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group.get("nesterov") and (_is_zero(group["momentum"]) or not _is_zero(group["dampening"])):
            raise ValueError("nesterov must come with a momentum and without dampening")
        values = named_values(group)
        for name in self.rule.tunable:
            for p in group["params"]:
                _check(name, values[name], p)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            values = named_values(group)
            for p in group["params"]:
                if p.grad is not None:
                    update, state = self.rule.update(values, p, p.grad, self.state[p])
                    # The first momentum is the gradient: keep a copy, or zero_grad would wipe it.
                    self.state[p] = {key: value.clone() if value is p.grad else value for key, value in state.items()}
                    p.sub_(update)
        return loss


class SGD(_RuleOptimizer):
    """``torch.optim.SGD`` with tensor hyperparameters."""

    rule = RULES["sgd"]

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        momentum: Number = 0.0,
        dampening: Number = 0.0,
        weight_decay: Number = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, _given(locals()))


class Adam(_RuleOptimizer):
    """``torch.optim.Adam`` with tensor hyperparameters."""

    rule = RULES["adam"]

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        weight_decay: Number = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, _given(locals()))


class AdamW(Adam):
    """``torch.optim.AdamW`` with tensor hyperparameters."""

    rule = RULES["adamw"]

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        weight_decay: Number = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


def steady_adam(h: Values, w: Tensor, g: Tensor, s: State) -> tuple[Tensor, dict[str, Any]]:
    """``u = lr * r * min(|r|, 1)`` with Adam's ratio ``r = m / sqrt(v)`` of the mean gradient to its size."""
    unit, state = RULES["adam"].update({**h, "lr": 1.0, "weight_decay": 0.0, "amsgrad": False}, w, g, s)
    return h["lr"] * unit * unit.abs().clamp(max=1.0), state


class SteadyAdam(_RuleOptimizer):
    """Adam that takes its full step only where gradients are steady; where they are mostly noise, a far shorter one.

    Made for hyperparameters, whose gradients are both in one run: all of one sign while a learning rate is wrong by
    orders of magnitude, and noise once it is right. With ``betas=(0.9, 0.95)``, noise alone moves Adam by 0.23 ``lr`` a
    step, and this by 0.08. Cf. Balles and Hennig (*Dissecting Adam*, ICML 2018).
    """

    rule = Rule(steady_adam, {})

    def __init__(
        self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-30
    ) -> None:
        super().__init__(params, _given(locals()))


def per_tensor(params: Iterable[nn.Parameter], **values: float) -> list[dict[str, Any]]:
    """One param group a tensor, for any optimizer: the tuner then finds one value a tensor."""
    return [{"params": [p], **values} for p in params]


def per_element(params: Iterable[nn.Parameter], **values: float) -> list[dict[str, Any]]:
    """One param group a tensor, with the named values spread over its elements, for the optimizers of this module."""
    if not values:
        raise ValueError("per_element must be given a value to spread, for example per_element(parameters, lr=0.1)")
    return [
        {"params": [p], **{k: torch.full_like(p, v, requires_grad=False) for k, v in values.items()}} for p in params
    ]


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}


def _is_zero(value: Number) -> bool:
    return not isinstance(value, Tensor) and value == 0


def _check(name: str, value: Any, p: nn.Parameter) -> None:
    if not bool((torch.as_tensor(value) >= 0).all()):
        raise ValueError(f"{name} must be at least 0, but got {value}")
    if name in ("beta1", "beta2") and not bool((torch.as_tensor(value) < 1).all()):
        raise ValueError(f"{name} must be below 1, but got {value}")
    if not isinstance(value, Tensor):
        return
    try:
        fits = torch.broadcast_shapes(value.shape, p.shape) == p.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must broadcast to the weight's shape {tuple(p.shape)}, but got {tuple(value.shape)}")
