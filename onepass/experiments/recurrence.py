r"""One layer of an LSTM over all its time steps, as one function with a derivative of its own.

.. math::
    z_t = p_t + W h_{t-1}, \quad i, f, o = \sigma(z_t^{i,f,o}), \; g = \tanh(z_t^g), \quad
    c_t = f c_{t-1} + i g, \quad h_t = o \tanh(c_t),

with :math:`p_t` what the inputs bring. Autograd through the loop would do nearly three times as many operations on the
way back, and make a matrix as large as :math:`W` at every time step; here whatever does not depend on the next time
step is computed for all of them at once, the derivative by :math:`W` in one matrix product. Being written in
differentiable operations of the function's own inputs and outputs, the derivative can be differentiated again.

Tensors have a leading axis, which ``torch.vmap`` makes as long as there are replicas: ``p`` is ``(1, time, rows, 4
width)``, ``W`` is ``(1, 4 width, width)``, the state before the first step twice ``(1, rows, width)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    h_to_c, h_to_o = o * (1 - tanh * tanh), tanh * o * (1 - o)
    c_to_gates = torch.stack([g * i * (1 - i), earlier_c * f * (1 - f), i * (1 - g * g)], -2)
    direct = _direct(sigma, g, to_sigma, to_g)
    to_h = torch.zeros_like(h) if to_h is None else to_h
    a_z, a_c, all_z = torch.zeros_like(sigma[:, 0]), torch.zeros_like(c_before), []
    for t in reversed(range(h.shape[1])):
        a_h = torch.baddbmm(to_h[:, t], a_z, w)
        a_c = torch.addcmul(a_c if to_c is None else a_c + to_c[:, t], a_h, h_to_c[:, t])
        a_z = torch.cat([(a_c.unsqueeze(-2) * c_to_gates[:, t]).flatten(-2), a_h * h_to_o[:, t]], -1)
        a_z = a_z if direct is None else a_z + direct[:, t]
        a_c = a_c * f[:, t]
        all_z.append(a_z)
    to_p = torch.stack(all_z[::-1], 1)
    to_w = to_p.flatten(1, 2).mT @ earlier_h.flatten(1, 2)
    return to_p, to_w, a_z @ w, a_c


def _direct(sigma: Tensor, g: Tensor, to_sigma: Tensor | None, to_g: Tensor | None) -> Tensor | None:
    """What cotangents of the gates themselves bring to ``z``."""
    found = None if to_sigma is None else to_sigma * sigma * (1 - sigma)
    if to_g is None:
        return found
    nothing, by_g = torch.zeros_like(g), to_g * (1 - g * g)
    more = torch.cat([nothing, nothing, by_g, nothing], -1)
    return more if found is None else found + more
