"""From what was asked for on the command line to the cells that it needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from onepass.experiments import artefacts
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS, data_of
from onepass.experiments.runs import Cell, Request, UsageError, finished

OF_TRAINING = ("datasets", "methods", "replicas", "steps", "split")


def wanted(args: argparse.Namespace) -> dict[str, list[Request]]:
    """Artefact -> its cells. Of all artefacts, those that have any of the data sets and methods asked for."""
    if "all" not in args.artefacts:
        return {name: requests_of(args, name) for name in args.artefacts}
    return {
        name: requests_of(args, name) for name in artefacts.EVERYTHING if _has_some(args, artefacts.ARTEFACTS[name])
    }


def _has_some(args: argparse.Namespace, artefact: artefacts.Artefact) -> bool:
    known, asked = (*artefact.every, *artefact.trial, "all"), args.datasets or artefact.datasets
    drawn = not artefact.methods  # with nothing trained
    return drawn or bool({*known} & {*asked} and {*artefact.methods} & {*(args.methods or artefact.methods)})


def requests_of(args: argparse.Namespace, name: str) -> list[Request]:
    artefact = artefacts.ARTEFACTS[name]
    if not artefact.methods:  # nothing is trained
        given = [f"--{option}" for option in OF_TRAINING if getattr(args, option) is not None]
        if given and "all" not in args.artefacts:
            raise UsageError(f"{name} trains nothing and has no use for {', '.join(given)}; leave that out")
        return []
    asked = args.datasets or artefact.datasets
    datasets = artefact.every if "all" in asked else asked
    known = (*artefact.every, *artefact.trial)
    others = [dataset for dataset in datasets if dataset not in known]
    if others and "all" not in args.artefacts:  # which have other data sets, too
        small = f" (to try it out, {' or '.join(artefact.trial)} too)" if artefact.trial else ""
        raise UsageError(f"{name} has {', '.join(artefact.every)}{small}, but not {', '.join(others)}")
    methods = [name for name in METHODS if name in (args.methods or artefact.methods) and name in artefact.methods]
    if not methods:
        raise UsageError(
            f"none of {', '.join(args.methods)} is for {artefact.about}; it has {', '.join(artefact.methods)}"
        )
    every = [
        (dataset, method) for dataset in PROTOCOLS if dataset in datasets and dataset in known for method in methods
    ]
    fitting = [request_of(args, *one) for one in every if artefact.takes(*one)]
    return [request for one in fitting for request in artefact.plan(one, args.replicas)]


def request_of(args: argparse.Namespace, dataset: str, method: str) -> Request:
    protocol = PROTOCOLS[dataset]
    splits = data_of(dataset).splits
    if args.split is not None and args.split not in range(splits):
        known = (
            f"--split must be from 0 to {splits - 1} for {dataset}" if splits else f"{dataset} has no numbered splits"
        )
        raise UsageError(f"{known}, but got {args.split}")
    row = METHODS[method]
    usual = row.search.replicas if row.search is not None else row.replicas or protocol.replicas
    replicas, fewest = args.replicas or usual, row.best_of
    if replicas < fewest:
        raise UsageError(f"{method} keeps one of {fewest} starts: --replicas must be at least that, but got {replicas}")
    engine = "local" if row.search is None else getattr(args, "engine", "local")
    steps = args.steps or (protocol.short_steps if row.short else protocol.steps)
    return Request(dataset, method, replicas, steps, args.seed, args.split, engine)


def comparable(args: argparse.Namespace, name: str, requests: list[Request], say: Callable[[str], None]) -> list[Cell]:
    """What was asked for, and what was finished before with the same settings: a file must not lose rows."""
    artefact = artefacts.ARTEFACTS[name]
    datasets = {*artefact.every, *(request.dataset for request in requests)}
    every = [
        request
        for dataset in PROTOCOLS
        for method in METHODS
        if dataset in datasets and artefact.takes(dataset, method)
        for request in _possible(args, artefact, dataset, method)
    ]
    found = []
    for request in every:
        try:
            cell = finished(request, args.out)
        except UsageError as error:  # of another configuration, or broken: the rest is still worth a look
            say(f"left out: {error}")
        else:
            found += [cell] if cell is not None else []
    return found


def _possible(args: argparse.Namespace, artefact: artefacts.Artefact, dataset: str, method: str) -> list[Request]:
    try:
        return artefact.plan(request_of(args, dataset, method), args.replicas)
    except UsageError:  # with these settings it cannot have been computed
        return []
