r"""One layer of an LSTM over all its time steps, as one function with a derivative of its own.

.. math::
    z_t = p_t + W h_{t-1}, \quad i, f, o = \sigma(z_t^{i,f,o}), \; g = \tanh(z_t^g), \quad
    c_t = f c_{t-1} + i g, \quad h_t = o \tanh(c_t),

with :math:`p_t` what the inputs bring. Autograd through the loop would do nearly three times as many operations on the
way back, and make a matrix as large as :math:`W` at every time step; here whatever does not depend on the next time
step is computed for all of them at once, the derivative by :math:`W` in one matrix product. The way back is itself a
linear recurrence, and the same holds for its derivative; what is around it are differentiable operations, so that a
product with the Hessian goes through the time steps four times and does the rest at once.

Tensors have a leading axis, which ``torch.vmap`` makes as long as there are replicas: ``p`` is ``(1, time, rows, 4
width)``, ``W`` is ``(1, 4 width, width)``, the state before the first step twice ``(1, rows, width)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

Tensors = tuple[Tensor, ...]
Cotangents = tuple[Tensor | None, ...]


def recurrence(p: Tensor, w: Tensor, h: Tensor, c: Tensor) -> Tensors:
    """All ``h_t``, all ``c_t``, all ``sigma(z_t)`` and all ``g_t``, with time as the second axis."""
    return Recurrence.apply(p, w, h, c)  # type: ignore[no-untyped-call, no-any-return]


class Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(p: Tensor, w: Tensor, h: Tensor, c: Tensor) -> Tensors:
        by_hidden, steps = w.mT, []
        for now in p.unbind(1):
            z = torch.baddbmm(now, h, by_hidden)
            sigma, g = z.sigmoid(), z.chunk(4, -1)[2].tanh()  # a quarter for nothing, in one operation instead of two
            i, f, _, o = sigma.chunk(4, -1)
            c = torch.addcmul(f * c, i, g)
            h = o * c.tanh()
            steps.append((h, c, sigma, g))
        return tuple(torch.stack(values, 1) for values in zip(*steps, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Tensors, output: Tensors) -> None:
        _, w, h, c = inputs
        ctx.save_for_backward(w, h, c, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Tensors:
        return pulled_back(ctx.saved_tensors, cotangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensors, tuple[int, ...]]:
        count = info.batch_size
        stacked = [
            x.expand(count, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(inputs, in_dims, strict=True)
        ]
        outputs = recurrence(*(x.flatten(0, 1) for x in stacked))
        return tuple(x.unflatten(0, (count, -1)) for x in outputs), (0,) * len(outputs)


def pulled_back(saved: Tensors, cotangents: Cotangents) -> Tensors:
    """Cotangents of the outputs, back to the inputs. Only a second derivative has any but the first."""
    w, h_before, c_before, h, c, sigma, g = saved
    to_h, to_c, to_sigma, to_g = cotangents
    i, f, _, o = sigma.chunk(4, -1)
    earlier_h, earlier_c = (torch.cat([x.unsqueeze(1), y[:, :-1]], 1) for x, y in ((h_before, h), (c_before, c)))
    tanh = c.tanh()
    to_gates = torch.cat([g * i * (1 - i), earlier_c * f * (1 - f), i * (1 - g * g), tanh * o * (1 - o)], -1)
    to_h = torch.zeros_like(h) if to_h is None else to_h
    direct = _direct(sigma, g, to_sigma, to_g)
    a_z, _, a_c = Backwards.apply(w, to_gates, o * (1 - tanh * tanh), f, to_h, to_c, direct)  # type: ignore[no-untyped-call]
    to_w = a_z.flatten(1, 2).mT @ earlier_h.flatten(1, 2)
    return a_z, to_w, a_z[:, 0] @ w, a_c[:, 0] * f[:, 0]


class Backwards(torch.autograd.Function):
    r"""Adjoints of ``z``, ``h`` and ``c`` at all time steps, from the last to the first:

    .. math::
        a^h_t = \hat h_t + W^\top a^z_{t+1}, \quad a^c_t = \hat c_t + f_{t+1} a^c_{t+1} + u_t a^h_t, \quad
        a^z_t = \hat z_t + k_t (a^c_t, a^c_t, a^c_t, a^h_t),

    with :math:`k_t` from the state to the gates, :math:`u_t` from ``h`` to ``c``, and what comes from outside in hats.
    """

    @staticmethod
    def forward(
        w: Tensor, k: Tensor, u: Tensor, f: Tensor, to_h: Tensor, to_c: Tensor | None, to_z: Tensor | None
    ) -> Tensors:
        a_z, carried, steps = torch.zeros_like(k[:, 0]), torch.zeros_like(u[:, 0]), []
        outside_c, outside_z = _steps(to_c, k), _steps(to_z, k)
        for t, (k_t, u_t, f_t, h_t) in reversed(
            list(enumerate(zip(*(x.unbind(1) for x in (k, u, f, to_h)), strict=True)))
        ):
            a_h = torch.baddbmm(h_t, a_z, w)
            a_c = torch.addcmul(_plus(carried, outside_c[t]), a_h, u_t)
            a_z = _plus(torch.cat([a_c, a_c, a_c, a_h], -1) * k_t, outside_z[t])
            carried = a_c * f_t
            steps.append((a_z, a_h, a_c))
        return tuple(torch.stack(values[::-1], 1) for values in zip(*steps, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensors) -> None:
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.outside = [x is not None for x in inputs[5:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Cotangents:
        """The same recurrence transposed, from the first time step to the last."""
        w, k, u, f, a_z, a_h, a_c = ctx.saved_tensors
        to_z, to_h, to_c = cotangents
        outside_h, outside_c = _steps(to_h, k), _steps(to_c, k)
        b_h, b_c, back, steps = torch.zeros_like(u[:, 0]), torch.zeros_like(u[:, 0]), w.mT, []
        to_z = torch.zeros_like(k) if to_z is None else to_z
        for t, (z_t, k_t, u_t, f_t) in enumerate(zip(*(x.unbind(1) for x in (to_z, k, u, f)), strict=True)):
            b_z = torch.baddbmm(z_t, b_h, back)
            i, g, f_, o = (b_z * k_t).chunk(4, -1)
            b_c = _plus(torch.addcmul(i + g + f_, b_c, f_t), outside_c[t])
            b_h = _plus(torch.addcmul(o, b_c, u_t), outside_h[t])
            steps.append((b_z, b_h, b_c))
        b_z, b_h, b_c = (torch.stack(values, 1) for values in zip(*steps, strict=True))
        earlier_h, earlier_c = (torch.cat([torch.zeros_like(b[:, :1]), b[:, :-1]], 1) for b in (b_h, b_c))
        by_w = a_z.flatten(1, 2).mT @ earlier_h.flatten(1, 2)
        found = by_w, b_z * torch.cat([a_c, a_c, a_c, a_h], -1), b_c * a_h, earlier_c * a_c, b_h
        return *found, *(b if given else None for b, given in zip((b_c, b_z), ctx.outside, strict=True))


def _steps(x: Tensor | None, like: Tensor) -> Sequence[Tensor | None]:
    return [None] * like.shape[1] if x is None else x.unbind(1)


def _plus(x: Tensor, more: Tensor | None) -> Tensor:
    return x if more is None else x + more


def _direct(sigma: Tensor, g: Tensor, to_sigma: Tensor | None, to_g: Tensor | None) -> Tensor | None:
    """What cotangents of the gates themselves bring to ``z``."""
    found = None if to_sigma is None else to_sigma * sigma * (1 - sigma)
    if to_g is None:
        return found
    nothing, by_g = torch.zeros_like(g), to_g * (1 - g * g)
    more = torch.cat([nothing, nothing, by_g, nothing], -1)
    return more if found is None else found + more


# --- in place of nn.LSTM ---


@contextmanager
def lstms_written_out(model: nn.Module) -> Iterator[None]:
    """Every ``nn.LSTM`` in the model computes its outputs by ``recurrence``.

    On a CPU, torch differentiates the way back through its own kernel one small operation after the other.
    """
    mine = [m for m in model.modules() if type(m) is nn.LSTM and not m.proj_size and "forward" not in vars(m)]
    try:
        for module in mine:
            module.forward = partial(written_out, module)  # type: ignore[method-assign]
        yield
    finally:
        for module in mine:
            del module.forward


def written_out(module: nn.LSTM, x: Any, state: Any = None) -> Any:
    """What ``module(x, state)`` returns. Packed or single sequences, autocast and forward mode are left to torch, and
    so are GPUs, which have one kernel for all of a time step but its matrix product.
    """
    usual = isinstance(x, Tensor) and x.dim() == 3 and x.is_cpu and x.dtype in (torch.float32, torch.float64)
    if not usual or not x.numel() or torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return nn.LSTM.forward(module, x, state)
    x = x.transpose(0, 1) if module.batch_first else x
    directions = 2 if module.bidirectional else 1
    layers = len(module.all_weights)  # each direction counts
    nothing = x.new_zeros(layers, x.shape[1], module.hidden_size)
    before = list(zip(*(nothing, nothing) if state is None else state, strict=True))
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(0, layers, directions):
        if layer and module.dropout and module.training:
            x = F.dropout(x, module.dropout)
        outputs = []
        for i in range(layer, layer + directions):
            backwards = i > layer
            h, c = _layer(x.flip(0) if backwards else x, before[i], module.all_weights[i])
            ends.append((h[-1], c[-1]))
            outputs.append(h.flip(0) if backwards else h)
        x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
    hidden, cell = (torch.stack(values) for values in zip(*ends, strict=True))
    return x.transpose(0, 1) if module.batch_first else x, (hidden, cell)


def _layer(x: Tensor, before: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    by_input, by_hidden, *biases = weights
    p = F.linear(x, by_input, biases[0] + biases[1] if biases else None)
    h, c, *_ = recurrence(*(tensor.unsqueeze(0) for tensor in (p, by_hidden, *before)))
    return h[0], c[0]
