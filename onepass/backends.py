"""Ways to compute the steps of an interval: one table, one meaning.

| name | how |
| --- | --- |
| eager | plain PyTorch: the reference |
| traced | recorded once as a list of operations, which then run with no autograd and no ``vmap`` in between |
| graphs | the same, a whole interval as one CUDA graph; CUDA alone |
| compiled | traced on a CPU, graphs on CUDA, with operations fused by ``torch.compile`` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.interval import Steps, advance, hyper_step, plain_step
from onepass.method import Method, Taken
from onepass.replicas import Named, Record, State, Weights, leaves, mapped, rebuilt
from onepass.watch import probation
from onepass.workers import Gate

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
THIN = 8  # rows or columns of a matrix product that are worth summing one by one


class Eager:
    def __init__(self, method: Method) -> None:
        self.method = method

    def plain(self, state: State, values: Named, taken: Taken) -> State:
        return plain_step(self.method, state, values, taken)

    def hyper(self, state: State, values: Named, taken: Sequence[Taken], valid: Any) -> tuple[State, Record]:
        return hyper_step(self.method, state, values, taken, valid)

    def probation(self, state: State, valid: Any) -> tuple[State, Tensor]:
        return probation(self.method, state, valid)

    def valid_loss(self, now: Weights, valid: Any) -> Tensor:
        return self.method.valid_loss(now, valid)

    def advance(
        self, state: State, batches: Sequence[Taken], valid: Any, earlier: Sequence[Taken], *, watch: bool
    ) -> tuple[State, Record]:
        return advance(self, state, batches, valid, earlier=earlier, watch=watch)


class Traced(Eager):
    """Operations are recorded the first time, for tensors of these shapes. Nothing random, no unrolling."""

    fuse = False

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self._plain = Program(
            lambda state, values, batch: plain_step(method, state, values, Taken(0, batch)), self.fuse
        )
        self._hyper = Program(
            lambda state, values, batch, valid: hyper_step(method, state, values, [Taken(0, batch)], valid), self.fuse
        )
        self._probation = Program(lambda state, valid: probation(method, state, valid), self.fuse)
        self._valid_loss = Program(method.valid_loss, self.fuse)

    def plain(self, state: State, values: Named, taken: Taken) -> State:
        return self._plain(state, values, taken.batch)  # type: ignore[no-any-return]

    def hyper(self, state: State, values: Named, taken: Sequence[Taken], valid: Any) -> tuple[State, Record]:
        return self._hyper(state, values, taken[-1].batch, valid)  # type: ignore[no-any-return]

    def probation(self, state: State, valid: Any) -> tuple[State, Tensor]:
        return self._probation(state, valid)  # type: ignore[no-any-return]

    def valid_loss(self, now: Weights, valid: Any) -> Tensor:
        return self._valid_loss(now, valid)  # type: ignore[no-any-return]


class Compiled(Traced):
    fuse = True


# Blocks run side by side; but the recorder looks at all of torch, and uses the module that they share.
_GATE = Gate()


class Program:
    """A pure function of nests of tensors, as the list of operations that it does."""

    def __init__(self, function: Callable[..., Any], fuse: bool) -> None:
        self._function, self._fuse = function, fuse
        self._programs: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *nests: Any) -> Any:
        given = leaves(nests)
        form = tuple((x.shape, x.stride(), x.dtype) for x in given)
        if form not in self._programs:
            with _GATE.alone():
                if form not in self._programs:
                    self._programs[form] = self._recorded(nests, given)
        program, result = self._programs[form]
        with _GATE.together(), torch.no_grad():
            return rebuilt(result, program(*given))

    def _recorded(self, nests: Any, given: list[Tensor]) -> tuple[Callable[..., Any], Any]:
        result: Any = None

        def flat(*tensors: Tensor) -> list[Tensor]:
            nonlocal result
            result = self._function(*rebuilt(nests, tensors))
            return leaves(result)

        program = make_fx(flat)(*given)
        simplify(program.graph)
        if self._fuse:
            open_thin_products(program.graph)
        program.graph.eliminate_dead_code()
        program.recompile()
        ready = _compiled(program, given) if self._fuse else program.forward
        return ready, mapped(lambda x: torch.empty(0), result)  # of the result, only the form is needed


_COMPILED: dict[str, Callable[..., Any]] = {}


def _compiled(program: fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
    """Compiling takes longer than many a run: populations that do the same operations share the result."""
    own_constants = id(program) if any(node.op == "get_attr" for node in program.graph.nodes) else ""
    key = f"{[_form(node) for node in program.graph.nodes if node.op == 'placeholder']} {program.code} {own_constants}"
    if key not in _COMPILED:
        ready = torch.compile(program, dynamic=False)
        with torch.no_grad():
            ready(*given)  # it is now that it compiles
        _COMPILED[key] = ready
    return _COMPILED[key]


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
    if node.target is aten.detach.default or (node.target in VIEWS and _form(node) == _form(first)):
        return first  # type: ignore[return-value]
    if node.target is aten.mul.Scalar and node.args[1] == 1 and _form(node) == _form(first):
        return first  # type: ignore[return-value]
    if node.target is aten.add.Tensor and len(node.args) == 2:
        # Double backward adds tensors of zeros, as large as a layer.
        for zeros, other in (node.args, node.args[::-1]):
            if getattr(zeros, "target", None) is aten.zeros_like.default and _form(node) == _form(other):
                return other  # type: ignore[return-value]
    return None


def _form(node: Any) -> Any:
    value = getattr(node, "meta", {}).get("val")
    return None if value is None else (value.shape, value.stride(), value.dtype)


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
    (_, rows, inner), (_, _, columns) = left.meta["val"].shape, right.meta["val"].shape
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


class Captured:
    """A whole interval as one CUDA graph. The state lives in the graph's own memory, and is read from there."""

    def __init__(self, steps: Eager) -> None:
        self.method, self._steps = steps.method, steps
        self._state: State | None = None
        self._graphs: dict[bool, _Graph] = {}

    def advance(
        self, state: State, batches: Sequence[Taken], valid: Any, earlier: Sequence[Taken], *, watch: bool
    ) -> tuple[State, Record]:
        if len(batches) != self.method.interval:  # the end of a run, or the rest of an interval
            return self._steps.advance(state, batches, valid, earlier, watch=watch)
        if self._state is None:
            self._state = mapped(torch.clone, state)
        elif state is not self._state:
            mapped(lambda mine, new: mine.copy_(new), self._state, state)
        if watch not in self._graphs:
            self._graphs[watch] = _Graph(self._steps, self._state, batches, valid, watch)
        return self._state, self._graphs[watch](batches, valid)


class _Graph:
    def __init__(self, steps: Steps, state: State, batches: Sequence[Taken], valid: Any, watch: bool) -> None:
        self._batches, self._given = [mapped(torch.clone, list(t)[1]) for t in batches], [t.batch for t in batches]
        self._valid, self._valid_given = mapped(torch.clone, valid), valid
        own = [Taken(taken.step, batch) for taken, batch in zip(batches, self._batches, strict=True)]

        def interval() -> tuple[State, Record]:
            return advance(steps, state, own, self._valid, watch=watch)

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            interval()  # libraries set themselves up, programs are recorded
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            after, self._record = interval()
            fresh = [(old, new) for old, new in zip(leaves(state), leaves(after), strict=True) if old is not new]
            # All new values are made before the first old one is overwritten.
            for (old, _), new in zip(fresh, [new.clone() for _, new in fresh], strict=True):
                old.copy_(new)

    def __call__(self, batches: Sequence[Taken], valid: Any) -> Record:
        for i, taken in enumerate(batches):
            if taken.batch is not self._given[i]:  # a full batch is the same every time
                mapped(lambda mine, new: mine.copy_(new), self._batches[i], taken.batch)
                self._given[i] = taken.batch
        if valid is not self._valid_given:
            mapped(lambda mine, new: mine.copy_(new), self._valid, valid)
            self._valid_given = valid
        self._graph.replay()
        return mapped(torch.clone, self._record)  # type: ignore[no-any-return]


class Backend(NamedTuple):
    """Steps that all blocks share, and whether each block has an interval of them as a CUDA graph."""

    steps: Eager
    captured: bool = False

    @property
    def side_by_side(self) -> bool:
        """Whether blocks take their steps at the same time: recorded operations touch nothing that they share.

        Compiled ones are few and large, and better off with all cores on each.
        """
        return type(self.steps) is Traced and not self.captured

    def engine(self) -> Eager | Captured:
        return Captured(self.steps) if self.captured else self.steps


BACKENDS: dict[str, Callable[[Method, torch.device], Backend]] = {
    "eager": lambda method, device: Backend(Eager(method)),
    "traced": lambda method, device: Backend(Traced(method)),
    "graphs": lambda method, device: Backend(Traced(method), captured=True),
    "compiled": lambda method, device: Backend(Compiled(method), captured=device.type == "cuda"),
}
