"""``Population``: many independent trainings of one small model, in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from onepass import checkpoint as files
from onepass.backends import BACKENDS, Backend
from onepass.batches import Feed, to_device
from onepass.begin import chosen_rule, made_by, set_up
from onepass.blocks import LANE, Block, block_size, lanes_of, members_of, merged, split
from onepass.evaluation import LossFunction
from onepass.guard import Guard
from onepass.interval import middles
from onepass.journal import PopulationHistory
from onepass.memory import kept_warm
from onepass.method import Taken, idle_parameters
from onepass.progress import Progress
from onepass.rearrange import checked_replicas, named_columns, taken_from, with_values
from onepass.replicas import Named, Record, State, Weights, from_plain, mapped, selected, to_plain
from onepass.rules import Rule
from onepass.settings import check_backend, check_count, check_method, checked_device
from onepass.stack import MakeModel, Stack
from onepass.stopwatch import Stopwatch
from onepass.tuner import HyperOptimizer, default_hyper_optimizer
from onepass.workers import Each, workers

WORTH_RECORDING = 300  # weight steps of all blocks: what is recorded serves them all, and the next run too
CPU = torch.device("cpu")


class Population:
    """Trains ``replicas`` copies of a small model at once, each tuned as a ``Tuner`` would tune it alone.

    >>> from onepass.starts import LogUniform
    >>> def loss(model, batch): return ((model(batch[0]) - batch[1]) ** 2).mean()
    >>> batch = torch.randn(32, 3), torch.randn(32, 1)
    >>> population = Population(lambda: nn.Linear(3, 1), loss, replicas=4, start={"lr": LogUniform(1e-6, 1e-1)})
    >>> population.run([batch], [batch], steps=20)
    >>> population.evaluate(loss, batch).shape
    torch.Size([4])

    Args:
        make_model: makes a freshly initialised model; called once a replica, and once more.
        loss: ``loss(model, batch)``, the scalar training loss.
        rule: a name from ``onepass.rules.RULES``, an ``onepass.Rule``, or a torch optimizer class that has one.
        replicas: how many.
        start: name -> ``LogUniform``, ``Uniform``, one number for all, or one number each; and the rule's switches.
            What is not named has torch's default.
        tune: names of what is tuned; by default everything whose start lies inside its domain in all replicas; ``()``
            for nothing.
        interval, lookback, through_state, hyper_optimizer, valid_loss, bounds, guard: as for ``Tuner``.
        per_element: tuned names that have a value of their own for every weight.
        unroll: take exact hypergradients through this many last steps, instead of the look-back series.
        estimator: "series" or "whole-run", as for ``Tuner``; or "product": minus the product of the gradient on a
            validation batch after a step and that of the step itself, for ``lr`` alone, handed to the hyper-optimizer
            as it is. With ``interval=1`` and the training data as ``valid`` that is Baydin et al. (2018).
        curvature: how to multiply by the training Hessian: "exact", or "finite-difference" of two gradients.
        clip_norm: clip the gradient of each replica to this Euclidean norm over all its weights, as
            ``torch.nn.utils.clip_grad_norm_`` does, inside the step that is differentiated.
        restart: go back to the first weights after every hyper step.
        scale: name -> what its value is multiplied by after every interval; for values that are not tuned.
        seed: of weights, starts and shuffles. Replica ``r`` does not depend on how many others there are.
        device: where everything is computed.
        block: replicas to work on at a time; by default as many as fit the cache of a CPU, or the memory of a GPU.
            Where training is random, as with dropout, always 8.
        backend: how steps are computed, a name from ``onepass.backends.BACKENDS``; "auto" is a fast one where it pays.

    Attributes:
        history: values and validation losses over time.
        steps: weight steps taken so far.
    """

    def __init__(
        self,
        make_model: MakeModel,
        loss: LossFunction,
        rule: str | Rule | type[torch.optim.Optimizer] = "sgd",
        *,
        replicas: int,
        start: Mapping[str, Any],
        tune: Sequence[str] | None = None,
        interval: int = 10,
        lookback: int | None = None,
        through_state: bool = True,
        hyper_optimizer: HyperOptimizer | None = None,
        valid_loss: LossFunction | None = None,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        guard: Guard | None = Guard(),  # noqa: B008 (frozen)
        per_element: Sequence[str] = (),
        unroll: int | None = None,
        estimator: str | None = None,
        curvature: str = "exact",
        clip_norm: float | None = None,
        restart: bool = False,
        scale: Mapping[str, Any] | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        block: int | None = None,
        backend: str = "auto",
    ) -> None:
        counts = {"replicas": replicas, "interval": interval, "lookback": lookback, "unroll": unroll, "block": block}
        for name, number in counts.items():
            if number is not None or name in ("replicas", "interval"):
                check_count(name, number)
        check_method(
            estimator=estimator,
            curvature=curvature,
            clip_norm=clip_norm,
            guard=guard,
            unroll=unroll,
            restart=restart,
            per_element=per_element,
        )
        self.replicas, self.seed, self.steps = replicas, seed, 0
        self._device = checked_device(device)
        # What is recorded must be the same in every interval: the steps to differentiate through, too.
        self._recordable = unroll is None or (unroll <= interval and not restart)
        check_backend(backend, self._device, recordable=self._recordable)
        self._stack = Stack(make_model, loss, valid_loss)
        self._method, state = set_up(
            self._stack,
            chosen_rule(rule),
            replicas=replicas,
            start=start,
            tune=tune,
            per_element=tuple(per_element),
            scale=scale or {},
            bounds=bounds or {},
            hyper_optimizer=hyper_optimizer or default_hyper_optimizer,
            guard=guard,
            restart=restart,
            seed=seed,
            interval=interval,
            lookback=lookback,
            through_state=through_state,
            unroll=unroll,
            estimator=estimator,
            curvature=curvature,
            clip_norm=clip_norm,
        )
        if estimator == "product" and (self._method.tune != ("lr",) or unroll is not None or per_element):
            tuned = ", ".join(self._method.tune) or "nothing"
            raise ValueError(f"estimator 'product' is for tune=('lr',), one value a replica, no unroll; got {tuned}")
        self._stack.module.to(self._device)
        self._state: State = mapped(lambda tensor: tensor.to(self._device), state)
        self._loss, self._valid_loss = loss, valid_loss
        self._named = {*start, *(("beta1", "beta2") if "betas" in start else ())}
        self._block, self._size, self._backend = block, block or replicas, backend
        self._earlier: list[Taken] = []
        self._feeds: Feeds | None = None
        self._loaded: dict[str, Any] | None = None  # what a loaded state has to say to the next run
        self._members = list(range(replicas))  # whose order of batches each replica has
        self._made: tuple[str, Backend] | None = None
        self._made_by = made_by(self._method, state, replicas=replicas, seed=seed, restart=restart)
        starts = {**state.fixed, **{name: state.limits[name].start for name in state.raw}}
        self.history = PopulationHistory(middles(starts), replicas, tuple(per_element))

    @torch.enable_grad()
    def run(
        self,
        train: Iterable[Any],
        valid: Iterable[Any] | None = None,
        *,
        steps: int,
        measure: Mapping[str, tuple[LossFunction, Any]] | None = None,
        measure_every: int | None = None,
        progress: bool = False,
        checkpoint: str | Path | None = None,
        every: int | None = None,
    ) -> None:
        """Take ``steps`` more weight steps.

        Args:
            train, valid: iterables of batches, cycled: a list, a DataLoader, ``onepass.Minibatches``. All replicas see
                the same batches, unless ``Minibatches`` says otherwise. ``valid`` may be left out if nothing is tuned.
            measure: name -> a metric and one batch to follow, as ``evaluate`` would, in ``history.measured``.
            measure_every: weight steps between two looks at them, up to the next end of an interval; by default one.
            progress: show a progress bar on stderr.
            checkpoint: a file to go on from if it is there, and to save to.
            every: weight steps between two savings; by default a tenth of ``steps``.
        """
        check_count("steps", steps)
        for name, number in (("every", every), ("measure_every", measure_every)):
            if number is not None:
                check_count(name, number)
        begin, end = self.steps, self.steps + steps
        self._feeds = feeds = self._checked_feeds(train, valid)
        metrics = {name: (metric, self._own_batch(batch)) for name, (metric, batch) in (measure or {}).items()}
        taken, valid_batch = self._prepare()
        origin = self._origin(taken, valid_batch) if checkpoint is not None else {}
        blocks = self._resume(checkpoint, origin, begin, end) or self._begin(taken, valid_batch, end)
        saved, pause, pause_of_metrics = self.steps, every or -(-steps // 10), measure_every or self._method.interval
        bar = Progress(self.steps, end) if progress else None
        # Beside the window of exact hypergradients, which grows, warm memory would be full of holes.
        warm = self._device.type == "cpu" and self._method.unroll is None
        threads = min(len(blocks), torch.get_num_threads()) if blocks[0].backend.side_by_side else 1
        try:
            with kept_warm() if warm else nullcontext(), workers(threads) as each:
                clock = Stopwatch(self._device, whole=self.steps == (self.history.measured_steps or [0])[-1])
                while self.steps < end:
                    before = self.steps
                    blocks, record = self._advance(blocks, end, each)
                    if measure and (before // pause_of_metrics < self.steps // pause_of_metrics or self.steps == end):
                        with clock.stopped():
                            self.history.measure(self.steps, self._measured(blocks, metrics), clock.lap())
                    if checkpoint is not None and (self.steps - saved >= pause or self.steps == end):
                        with clock.stopped():
                            self._save(checkpoint, origin, begin, blocks)
                        saved = self.steps
                    if bar is not None and bar.due(self.steps):
                        bar.show(self.steps, record.valid_loss if feeds.valid else None)
        finally:  # an interrupted run stands where it was after its last whole interval
            self._state = merged(blocks, [block.state for block in blocks])
            if bar is not None:
                bar.close()

    def values(self) -> Named:
        """Name -> one value a replica, natural units; ``(replicas, weights)`` where every weight has its own.

        Weights are in the order of ``torch.nn.utils.parameters_to_vector``.
        """
        method, state = self._method, self._state
        found = {**state.fixed, **{name: method.natural(state, name) for name in method.tune}}
        columns = {name: (v[:, 0] if v.shape[1] == 1 else v).cpu().clone() for name, v in found.items()}
        shared = {n: float(v) for n, v in method.switches.items() if n in self._named and n in method.rule.tunable}
        return columns | {n: torch.full((self.replicas,), v, dtype=torch.float64) for n, v in shared.items()}

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Other hyperparameters from here on: name -> one number, or one a replica, natural units.

        Tuned ones stay inside their bounds, and are tuned on from there. Constants that all share cannot be set.
        """
        self._state = with_values(self._method, self._state, values)
        now = self.values()
        self.history.amend(self.steps, named_columns({name: now[name] for name in values}))

    def keep(self, replicas: Sequence[int] | Tensor) -> None:
        """Go on with these replicas alone, in this order: nothing else changes for them."""
        index = checked_replicas("replicas", replicas, self.replicas)
        if len(index.unique()) < len(index):
            raise ValueError("replicas must differ from each other; population.copy(sources) makes copies")
        self._rearrange(index)
        self._members = [self._members[i] for i in index.tolist()]
        self.replicas = self._size = len(index)

    def copy(self, sources: Sequence[int] | Tensor) -> None:
        """Replica ``r`` becomes what ``sources[r]`` is: weights, optimizer, values and how they are tuned, history.

        With mini-batches in an order of their own, copies see different ones from here on.
        """
        index = checked_replicas("sources", sources, self.replicas)
        if len(index) != self.replicas:
            raise ValueError(f"sources must be {self.replicas} numbers, one a replica, but got {len(index)}")
        self._rearrange(index)

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from, in tensors on the CPU and plain containers."""
        batches = self._loaded or {
            "feeds": [feed.state_dict() for feed in self._feeds or () if feed is not None],
            "earlier": [(taken.step, tree_leaves(to_device(taken.batch, CPU))) for taken in self._earlier],
        }
        return {
            "steps": self.steps,
            "members": self._members,
            "state": to_plain(self._state),
            "batches": batches,
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, in a population made with the same arguments and as many replicas."""
        if len(state["members"]) != self.replicas:
            raise ValueError(f"the state must be of {self.replicas} replicas, but is of {len(state['members'])}")
        found: State = from_plain(state["state"], self._device)
        if found.now.weights.shape != self._state.now.weights.shape or {*found.raw} != {*self._state.raw}:
            raise ValueError(
                f"the state must be of the same model and tuned values, {sorted(self._state.raw)}, but is of "
                f"{tuple(found.now.weights.shape)[1]} weights and {sorted(found.raw)}"
            )
        self.steps, self._members, self._state = state["steps"], list(state["members"]), found
        self._feeds, self._loaded = None, state["batches"] if state["steps"] else None
        self.history.load_state_dict(dict(state["history"]))

    def evaluate(self, metric: LossFunction, batch: Any) -> Tensor:
        """``metric(model, batch)`` of every replica, in evaluation mode; NaN where a replica has diverged."""
        batch = self._own_batch(batch)
        parts = torch.arange(self.replicas, device=self._device).split(self._size)
        values = torch.cat([self._metric(metric, selected(self._state.now, part), batch) for part in parts]).cpu()
        lost = self.diverged()
        if lost.any() and not values.is_floating_point():
            values = values.double()
        return values.masked_fill(lost, torch.nan) if lost.any() else values

    def best(self, k: int = 1) -> list[nn.Module]:
        """The ``k`` replicas with the lowest loss on all validation batches, as ordinary modules, best first.

        Both the loss and the modules in evaluation mode. Lost replicas come last.
        """
        check_count("k", k)
        if self._feeds is None or self._feeds.valid is None:
            raise RuntimeError("best needs a validation loss, but there was no run(train, valid, steps=...) with valid")
        if k > self.replicas:
            raise ValueError(f"k must be at most the {self.replicas} replicas there are, but got {k}")
        loss = self._valid_loss or self._loss
        losses = torch.stack([self.evaluate(loss, batch) for batch in self._feeds.valid.one_pass()]).mean(0)
        order = losses.nan_to_num(torch.inf, posinf=torch.inf, neginf=torch.inf).argsort(stable=True)
        return [self.model(int(r)).eval() for r in order[:k]]

    def model(self, replica: int) -> nn.Module:
        """One replica as an ordinary module."""
        now = self._state.now
        return self._stack.model(now.weights[replica], {name: b[replica] for name, b in now.buffers.items()})

    def diverged(self) -> Tensor:
        """Which replicas have weights that are not finite."""
        return ~self._state.now.weights.isfinite().all(1).cpu()

    def __repr__(self) -> str:
        tuned = ", ".join(self._method.tune) or "nothing"
        return f"Population of {self.replicas} after {self.steps} steps, tuning {tuned}"

    def _own_batch(self, batch: Any) -> Any:
        if isinstance(batch, (list, tuple)) and any(isinstance(part, (list, tuple, dict)) for part in batch):
            raise ValueError("evaluate takes one batch, but got several; evaluate them one by one and take the mean")
        if not any(isinstance(part, Tensor) for part in tree_leaves(batch)):
            raise ValueError(f"evaluate takes one batch, with tensors in it, but got {type(batch).__name__}")
        return to_device(batch, self._device)

    def _metric(self, metric: LossFunction, now: Weights, batch: Any) -> Tensor:
        return self._stack.metric(metric, now.weights, now.buffers, batch)

    # --- inside a run ---

    def _checked_feeds(self, train: Any, valid: Any) -> Feeds:
        """Where batches come from; the same as in the last run, they go on where they were."""
        if valid is None and self._method.tune:
            raise ValueError(f"valid must be given to tune {', '.join(self._method.tune)}, but got None")

        def feed(batches: Any, name: str, last: Feed | None) -> Feed:
            if last is not None and last.batches is batches:
                last.members = self._members
                return last
            return Feed(batches, name, self._device, self._members, self.seed)

        last_train, last_valid = self._feeds or (None, None)
        found = Feeds(feed(train, "train", last_train), None if valid is None else feed(valid, "valid", last_valid))
        if self._loaded is not None:
            self._found_again(found, self._loaded)
            self._loaded = None
        return found

    def _found_again(self, feeds: Feeds, loaded: Mapping[str, Any]) -> None:
        """The place in the batches, and the last ones, that a loaded state was saved with."""
        for feed, place in zip([feed for feed in feeds if feed is not None], loaded["feeds"], strict=True):
            feed.load_state_dict(place)
        form = tree_structure(feeds.train.peek())
        batches = [(step, tree_unflatten(parts, form)) for step, parts in loaded["earlier"]]
        self._earlier = [Taken(step, to_device(batch, self._device)) for step, batch in batches]

    def _rearrange(self, index: Tensor) -> None:
        self._state = taken_from(self._state, index)
        if self._method.per_replica[0]:
            self._earlier = [taken._replace(batch=taken_from(taken.batch, index)) for taken in self._earlier]
        self.history.choose(index)

    def _begin(self, taken: Taken, valid: Any, end: int) -> list[Block]:
        random = self._method.dropout is not None
        self._size = block_size(self._method, self._state, taken, valid, LANE if random else self._block)
        members = (
            lanes_of(self.replicas, self._device) if random else members_of(self.replicas, self._size, self._device)
        )
        blocks = split(self._chosen_backend(end, len(members)), self._state, members, [True] * len(members))
        for block in blocks:
            block.begin(taken, valid)
        return blocks

    def _prepare(self) -> tuple[Taken, Any]:
        """Adapt the method to these batches: who has batches of its own, what they leave idle, is anything random."""
        assert self._feeds is not None
        train, valid = self._feeds
        per_replica = train.per_replica, valid is not None and valid.per_replica
        self._method = replace(self._method, per_replica=per_replica, dropout=None)
        taken = Taken(self.steps, train.peek())
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            before = _random_state(self._device)
            idle = idle_parameters(self._method, self._state, taken)
            if valid is not None:
                one = selected(valid.peek(), slice(1)) if valid.per_replica else valid.peek()
                self._method.valid_loss(selected(self._state.now, slice(1)), one)
            random = not torch.equal(before, _random_state(self._device))
        self._method = replace(self._method, idle=idle, dropout=self.seed if random else None)
        return taken, valid.peek() if valid is not None else None

    def _origin(self, taken: Taken, valid: Any) -> dict[str, Any]:
        """What a checkpoint of this run has to agree with."""
        assert self._feeds is not None
        data = {feed.name: feed.digest() for feed in self._feeds if feed is not None}
        return {**self._made_by, **data, "first step": self.steps, "first losses": self._first_losses(taken, valid)}

    def _first_losses(self, taken: Taken, valid: Any) -> str:
        """Of one replica, to notice a loss or a network that has changed since."""
        method, now = self._method, selected(self._state.now, slice(1))
        own = [
            selected(b, slice(1)) if each else b
            for b, each in zip((taken.batch, valid), method.per_replica, strict=True)
        ]
        with torch.no_grad():
            train = method.losses(method.stack.views(now.weights), mapped(torch.clone, now.buffers), Taken(0, own[0]))
        losses = [float(train), float("nan") if valid is None else float(method.valid_loss(now, own[1]))]
        return ", ".join(f"{loss:.4g}" for loss in losses)

    def _advance(self, blocks: list[Block], end: int, each: Each) -> tuple[list[Block], Record]:
        """All blocks to the end of the interval, or of the run."""
        assert self._feeds is not None
        method, feeds = self._method, self._feeds
        count = min(method.interval - self.steps % method.interval, end - self.steps)
        batches = [Taken(self.steps + i, next(feeds.train)) for i in range(count)]
        whole = (self.steps + count) % method.interval == 0
        valid = None if feeds.valid is None else next(feeds.valid) if whole else feeds.valid.peek()
        if self.steps == 0:  # still eager
            found = [block.advanced(batches, valid, self._earlier) for block in blocks]
        else:
            found = each(lambda block: block.advanced(batches, valid, self._earlier), blocks)
        record = merged(blocks, [one for _, one in found])
        for block, (state, _) in zip(blocks, found, strict=True):
            block.state = state
        self.steps += count
        self.history.append(self.steps, record)
        if method.unroll is not None:
            self._earlier = [*self._earlier, *batches][-method.unroll :]
        settled = method.unroll is None and method.dropout is None  # no windows, no lanes to keep together
        if method.guard is None and settled and self._device.type == "cpu":
            blocks = [part for block in blocks for part in block.without_lost()]
        return blocks, record

    def _measured(self, blocks: list[Block], metrics: Mapping[str, tuple[LossFunction, Any]]) -> Named:
        def of(metric: LossFunction, now: Weights, batch: Any) -> Tensor:
            lost = ~now.weights.isfinite().all(1)
            return self._metric(metric, now, batch).double().masked_fill(lost, torch.nan)

        return {
            name: merged(blocks, [of(metric, block.state.now, batch) for block in blocks])
            for name, (metric, batch) in metrics.items()
        }

    def _chosen_backend(self, end: int, blocks: int) -> Backend:
        """Recording operations takes as long as some hundred steps of a block, and cannot record random numbers."""
        few = end * blocks < WORTH_RECORDING
        eager = self._method.dropout is not None or not self._recordable or few
        if self._method.dropout is not None and self._backend not in ("auto", "eager"):
            raise ValueError(
                f"backend must be 'auto' or 'eager' where the loss draws random numbers, but got {self._backend!r}"
            )
        fast = "graphs" if self._device.type == "cuda" else "traced"
        name = self._backend if self._backend != "auto" else "eager" if eager else fast
        if self._made is None or self._made[0] != name or self._made[1].steps.method != self._method:
            self._made = name, BACKENDS[name](self._method, self._device)
        return self._made[1]  # what it has recorded serves the next run too

    # --- saving ---

    def _save(self, path: str | Path, origin: dict[str, Any], begin: int, blocks: list[Block]) -> None:
        self._state = merged(blocks, [block.state for block in blocks])
        files.save(
            path,
            {
                "made_by": origin,
                "steps": [begin, self.steps],
                "blocks": [(block.members.tolist(), block.alive) for block in blocks],
                "size": self._size,
                "population": self.state_dict(),
            },
        )

    def _resume(self, path: str | Path | None, origin: dict[str, Any], begin: int, end: int) -> list[Block] | None:
        if path is None or not Path(path).exists():
            return None
        assert self._feeds is not None
        saved = files.load(path, origin)
        if saved["steps"][1] > end:
            raise ValueError(
                f"checkpoint {path} must not have come further than step {end}, but it is at {saved['steps'][1]}; "
                "give another path to begin anew"
            )
        feeds, self._size = self._feeds, saved["size"]
        self.load_state_dict(saved["population"])
        self._feeds, self._loaded = feeds, None
        self._found_again(feeds, saved["population"]["batches"])
        members = [torch.tensor(members, device=self._device) for members, _ in saved["blocks"]]
        alive = [alive for _, alive in saved["blocks"]]
        return split(self._chosen_backend(end, len(members)), self._state, members, alive)


class Feeds(NamedTuple):
    """Where batches come from."""

    train: Feed
    valid: Feed | None


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
