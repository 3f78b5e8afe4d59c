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
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from onepass.curvature import FIRST_ORDER
from onepass.interval import Steps, advance, hyper_step, plain_step
from onepass.method import Method, Taken
from onepass.operations import form_of, open_thin_products, recorded, simplify
from onepass.precision import full_precision
from onepass.replicas import Named, Record, State, Weights, leaves, mapped, rebuilt
from onepass.watch import probation
from onepass.workers import Gate


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
    """Operations are recorded the first time, for tensors of these shapes. Nothing random."""

    fuse = False

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self._plain = Program(
            lambda state, values, batch: plain_step(method, state, values, Taken(0, batch)), self.fuse
        )
        self._hyper = Program(
            lambda state, values, batches, valid: hyper_step(
                method, state, values, [Taken(0, batch) for batch in batches], valid
            ),
            self.fuse,
        )
        self._probation = Program(lambda state, valid: probation(method, state, valid), self.fuse)
        self._valid_loss = Program(method.valid_loss, self.fuse)

    def plain(self, state: State, values: Named, taken: Taken) -> State:
        return self._plain(state, values, taken.batch)  # type: ignore[no-any-return]

    def hyper(self, state: State, values: Named, taken: Sequence[Taken], valid: Any) -> tuple[State, Record]:
        batches = [one.batch for one in taken[-(self.method.unroll or 1) :]]
        # When it was recorded, finite differences saw to their precision themselves. A CPU has none to see to.
        delicate = self.method.curvature in FIRST_ORDER and state.now.weights.is_cuda
        with full_precision() if delicate else nullcontext():
            return self._hyper(state, values, batches, valid)  # type: ignore[no-any-return]

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

        constants, graph = recorded(flat, given)
        simplify(graph)
        if self._fuse:
            open_thin_products(graph)
        graph.eliminate_dead_code()
        program = fx.GraphModule(constants, graph)
        ready = _compiled(program, given) if self._fuse else program.forward
        return ready, mapped(lambda x: torch.empty(0), result)  # of the result, only the form is needed


_COMPILED: dict[str, Callable[..., Any]] = {}


def _compiled(program: fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
    """Compiling takes longer than many a run: populations that do the same operations share the result."""
    own_constants = id(program) if any(node.op == "get_attr" for node in program.graph.nodes) else ""
    forms = [form_of(node) for node in program.graph.nodes if node.op == "placeholder"]
    key = f"{forms} {program.code} {own_constants}"
    if key not in _COMPILED:
        ready = torch.compile(program, dynamic=False)
        with torch.no_grad():
            ready(*given)  # it is now that it compiles
        _COMPILED[key] = ready
    return _COMPILED[key]


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
