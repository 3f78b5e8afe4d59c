"""What a function of tensors does, as a list of operations: recorded, and made shorter.

The recorder does what ``make_fx`` of torch does, without the tracebacks and stand-ins for tensors that make up nine
tenths of its time. A test compares the two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
THIN = 8  # rows or columns of a matrix product that are worth summing one by one


def recorded(function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> tuple[dict[str, Tensor], fx.Graph]:
    """The operations that the function does with these tensors, below autograd and ``vmap``; and tensors from outside
    that they use, by name: the two parts of a ``GraphModule``.
    """
    recorder = _Recorder()
    # The same tensor may be given in two places, and two different ones there the next time.
    inputs = [recorder.input(x.detach()) for x in given]
    with recorder:
        results = function(*inputs)
    recorder.graph.output([recorder.node(x) for x in results])
    return recorder.constants, recorder.graph


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.constants = fx.Graph(), dict[str, Tensor]()
        self._nodes = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = [x in self._nodes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if torch.Tag.data_dependent_output in func.tags and any(known):
            raise RuntimeError(
                f"what is recorded must not depend on the value of a tensor, but it calls {func}; use backend='eager'"
            )
        out = func(*args, **(kwargs or {}))
        self._follow(out, self._called(func, args, kwargs or {}))
        return out

    def _called(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        if func is aten.lift_fresh.default:  # the end of ``torch.tensor``: the result may be changed in place
            func, args = aten.lift_fresh_copy.default, (args[0].clone(),)
        return self.graph.call_function(func, *tree_map_only(Tensor, self.node, (args, kwargs)))

    def input(self, tensor: Tensor) -> Tensor:
        self._follow(tensor, self.graph.placeholder(f"given_{len(self.graph.nodes)}"))
        return tensor

    def node(self, tensor: Tensor) -> fx.Node:
        """What made this tensor; for one from outside, which is always the same, itself."""
        if tensor not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor
            self._follow(tensor, self.graph.get_attr(name))
        return self._nodes[tensor]  # type: ignore[no-any-return]

    def _follow(self, out: Any, node: fx.Node) -> None:
        if isinstance(out, Tensor):
            node.meta["form"] = out.shape, out.stride(), out.dtype
            self._nodes[out] = node
        elif isinstance(out, (tuple, list)):
            for i, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._follow(part, self.graph.call_function(operator.getitem, (node, i)))


def simplify(graph: fx.Graph) -> None:
    """Drop operations that do nothing, and those that were done before: half of what autograd and ``vmap`` leave."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    pure = not any(node.target._schema.is_mutable for node in calls if hasattr(node.target, "_schema"))
    done: dict[Any, fx.Node] = {}
    for node in calls:
        same = _does_nothing(node)
        if same is None and pure and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            same = done.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _does_nothing(node: fx.Node) -> fx.Node | None:
    """The argument that already is the result."""
    first = node.args[0] if node.args else None
    if node.target is aten.detach.default or (node.target in VIEWS and form_of(node) == form_of(first)):
        return first  # type: ignore[return-value]
    if node.target is aten.mul.Scalar and node.args[1] == 1 and form_of(node) == form_of(first):
        return first  # type: ignore[return-value]
    if node.target is aten.add.Tensor and len(node.args) == 2:
        # Double backward adds tensors of zeros, as large as a layer.
        for zeros, other in (node.args, node.args[::-1]):
            if getattr(zeros, "target", None) is aten.zeros_like.default and form_of(node) == form_of(other):
                return other  # type: ignore[return-value]
    return None


def form_of(node: Any) -> Any:
    """Shape, strides and type of what a node gives."""
    return getattr(node, "meta", {}).get("form")


def open_thin_products(graph: fx.Graph) -> None:
    """Matrix products with a thin side become elementwise products and sums, which a compiler can fuse with what comes
    before and after; a library's matrix product has to read or write the whole of a layer by itself.
    """
    for node in list(graph.nodes):
        if node.target is not aten.bmm.default:
            continue
        with graph.inserting_before(node):
            new = _opened(graph, *node.args)
        if new is not None:
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _opened(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node | None:
    call = graph.call_function
    (_, rows, inner), (_, _, columns) = form_of(left)[0], form_of(right)[0]
    if inner == 1:
        return call(aten.mul.Tensor, (left, right))
    if rows <= THIN < columns:
        turned = [call(aten.transpose.int, (row, 1, 2)) for row in _cut(graph, left, 1, rows)]
        sums = [call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (row, right)), [1], True)) for row in turned]
        return sums[0] if rows == 1 else call(aten.cat.default, (sums, 1))
    if columns <= THIN:
        turned = [call(aten.transpose.int, (column, 1, 2)) for column in _cut(graph, right, 2, columns)]
        sums = [call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (left, column)), [2], True)) for column in turned]
        return sums[0] if columns == 1 else call(aten.cat.default, (sums, 2))
    return None


def _cut(graph: fx.Graph, node: fx.Node, dim: int, pieces: int) -> list[fx.Node]:
    if pieces == 1:
        return [node]
    return [graph.call_function(aten.slice.Tensor, (node, dim, k, k + 1)) for k in range(pieces)]
