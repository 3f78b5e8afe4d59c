"""The command line: ``onepass demo``, ``list``, ``run``, ``reproduce``, ``search``, ``report``."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from onepass.backends import BACKENDS
from onepass.rules import RULES

try:
    from onepass.experiments import artefacts, asked, cluster, costs, demo, tables
    from onepass.experiments.datasets import DATASETS
    from onepass.experiments.methods import METHODS
    from onepass.experiments.protocol import PROTOCOLS, data_of, title_of
    from onepass.experiments.runs import Cell, Request, UsageError, check_backend, compute, finished
    from onepass.experiments.search import ENGINES, command
    from onepass.experiments.sources import DataError
except ModuleNotFoundError as missing:
    sys.exit(f"onepass: the command line needs {missing.name}: pip install 'onepass[experiments]'")

HELP = "Tunes hyperparameters while a model trains, and reproduces the paper it comes from."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 2: a user's mistake, told in one line; 130: interrupted."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever called
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± is no reason to lose a result
    args = parser().parse_args(arguments)
    try:
        args.command(args)
        sys.stdout.flush()
    except (UsageError, DataError, MemoryError) as error:
        return _failed(str(error))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, say
        return _failed(f"cannot write or read {error.filename or 'a file'}: {error.strerror or error}")
    except KeyboardInterrupt:
        kept = getattr(args, "out", None)
        go_on = f"; what is finished stays in {kept}, and the same command goes on from there" if kept else ""
        print(f"\nonepass: interrupted{go_on}", file=sys.stderr)
        return 130
    return 0


def _failed(message: str) -> int:
    print(f"onepass: {' '.join(message.split())}", file=sys.stderr)
    return 2


# --- what can be asked ---


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(_failed(f"{message} ({self.prog} --help)"))


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="onepass", description=HELP)
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    one = _command(commands, "demo", show_demo, demo.ABOUT)
    one.add_argument("--out", type=_folder, default=Path("out/demo"), help="folder of the report (default %(default)s)")
    one.add_argument("--replicas", type=_count, default=32, help="random starts (default %(default)s)")

    _command(commands, "list", show_list, "Data sets, methods and artefacts by name.")

    one = _command(commands, "run", run, "One data set by one method, many starts at once. " + COSTS)
    one.add_argument(
        "dataset", type=_known("data set", PROTOCOLS), metavar="DATASET", help="a name from `onepass list`"
    )
    one.add_argument("method", type=_known("method", METHODS), metavar="METHOD", help="see `onepass list`")
    one.add_argument("--out", type=_folder, help="keep the result here, and go on from here if killed")
    _settings(one)

    one = _command(commands, "reproduce", reproduce, "Tables and figures of the paper. " + COSTS)
    one.formatter_class, one.epilog = WithCosts, "WHAT EACH TAKES"
    one.add_argument(
        "artefacts",
        nargs="+",
        type=_known("artefact", {**artefacts.ARTEFACTS, "all": None}),
        metavar="ARTEFACT",
        help="such as uci or fashion-mnist, or all; see `onepass list`",
    )
    one.add_argument(
        "--datasets",
        nargs="+",
        type=_known("data set", {**PROTOCOLS, "all": None}),
        metavar="DATASET",
        help="instead of the artefact's usual ones; `all` for all it has (of UCI, eight instead of three)",
    )
    one.add_argument("--methods", nargs="+", type=_known("method", METHODS), metavar="METHOD", help="only these")
    one.add_argument(
        "--out",
        type=Path,
        default=Path("out/paper"),
        help="folder of results; what it has is not repeated (%(default)s)",
    )
    one.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: one method after the other; ray: side by side, one a CPU or GPU of a Ray cluster (%(default)s)",
    )
    one.add_argument(
        "--address",
        help="of the Ray cluster: auto, HOST:PORT, ray://HOST:PORT (default: $RAY_ADDRESS, else this machine)",
    )
    _settings(one)

    _search(_command(commands, "search", search, command.ABOUT))

    one = _command(
        commands,
        "report",
        write_report,
        "An HTML page of all results in a folder, and its pictures as PNG and PDF; takes seconds, or a minute for all "
        "eight UCI sets. With --live it is served to this machine instead, and follows a reproduction that is running.",
    )
    one.add_argument("out", type=Path, metavar="DIR", help="what was given to --out")
    one.add_argument("--live", action="store_true", help="serve the page here until Ctrl-C; it follows the folder")
    one.add_argument("--port", type=_port, default=None, help="of --live (default: a free one)")
    return top


class WithCosts(argparse.HelpFormatter):
    """Instead of the last paragraph, what each artefact takes."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text != "WHAT EACH TAKES":
            return super()._fill_text(text, width, indent)
        nothing_said = dict.fromkeys(("replicas", "steps", "split", "datasets", "methods"))
        usual = argparse.Namespace(**nothing_said, seed=0, engine="local", artefacts=())
        names = artefacts.ARTEFACTS
        lines = [f"  {name:{max(map(len, names))}}  {costs.in_short(asked.requests_of(usual, name))}" for name in names]
        about = super()._fill_text(f"What each takes alone ({costs.MEASURED}):", width, indent)
        return "\n".join([about, *lines])


COSTS = (
    "200 starts x 4000 steps of a UCI set take 2 to 20 s a method on one H200, and 1 to 25 minutes on 2 CPU cores, of "
    "which --backend compiled saves half; 100 starts x 10000 steps of Fashion-MNIST take 7 to 25 s a method there, and "
    "10 minutes or more here; Penn Treebank needs a GPU, for hours. Methods long- and full-diff-through-opt train 30 "
    "to 50 times. All can be killed and go on with the same command."
)


def _command(commands: Any, name: str, function: Callable[[Any], None], about: str) -> argparse.ArgumentParser:
    one: argparse.ArgumentParser = commands.add_parser(name, help=about.split(". ")[0], description=about)
    one.set_defaults(command=function)
    return one


def _settings(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--replicas", type=_count, help="random starts (default: 200; 100 of Fashion-MNIST; 8 of Penn Treebank)"
    )
    one.add_argument("--steps", type=_count, help="weight steps (default: the paper's: 4000, 10000, 23910)")
    one.add_argument("--seed", type=int, default=0, help="of starts and weights (default %(default)s)")
    one.add_argument("--split", type=int, help="a clean numbered split, 0 to 19, instead of the paper's rows")
    one.add_argument("--device", type=_device, default=None, help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    one.add_argument(
        "--backend",
        type=_known("backend", ("auto", *BACKENDS)),
        default="auto",
        help="how steps are computed: auto, compiled, eager, traced, graphs",
    )
    one.add_argument(
        "--data-dir", type=_existing, help="where data sets are (else $ONEPASS_DATA, then ~/.cache/onepass)"
    )
    one.add_argument("--json", action="store_true", help="machine-readable results on stdout, and nothing else there")
    one.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _search(one: argparse.ArgumentParser) -> None:
    one.add_argument("file", type=Path, metavar="FILE", help="your Python file")
    one.add_argument(
        "--search",
        type=_known("search", ENGINES["local"]),
        default="asha",
        help="asha: many starts, of which the best quarter goes on again and again; it sees most of the space for its "
        "money (%(default)s). random: every start to the end; pbt: paths that copy the best and change their values; "
        "bayesian-optimisation: one start after the other, learning from all before",
    )
    one.add_argument("--budget", type=_count, default=16, help="in whole trainings, about (%(default)s)")
    one.add_argument("--steps", type=_count, default=1000, help="weight steps of a whole training (%(default)s)")
    one.add_argument("--fixed", action="store_true", help="keep starting values; by default they are tuned on the way")
    one.add_argument("--rule", type=_known("rule", RULES), help="such as adam or adamw (default: the file's, else sgd)")
    one.add_argument("--name", metavar="STUDY", help="its folder inside --out (default: the file's name)")
    one.add_argument("--engine", choices=("local", "ray"), default="local", help="this process, or Ray (%(default)s)")
    one.add_argument("--address", help="of the Ray cluster: auto, HOST:PORT, ray://HOST:PORT (default: this machine)")
    one.add_argument("--block", type=_count, help="starts that one worker of Ray trains together (default 1)")
    one.add_argument("--device", type=_device, default=None, help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    one.add_argument("--seed", type=int, default=0, help="of starts, weights and every choice (%(default)s)")
    one.add_argument("--out", type=_folder, default=Path("out/search"), help="folder of all searches (%(default)s)")
    one.add_argument("--json", action="store_true", help="machine-readable results on stdout, and nothing else there")
    one.add_argument("--quiet", action="store_true", help="no progress on stderr")
    one.set_defaults(backend="auto")


def _known(what: str, table: Iterable[str]) -> Callable[[str], str]:
    names = list(table)

    def check(name: str) -> str:
        if name in names:
            return name
        if what == "data set" and name in DATASETS:
            raise argparse.ArgumentTypeError(f"no protocol for {name} yet; there is one for {', '.join(PROTOCOLS)}")
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
        raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; {hint}")

    return check


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must be the name of a folder, but is empty")
    return Path(text)


def _existing(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder that is there, but got {text!r}")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) not in range(65536):
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, but got {text!r}")
    return int(text)


def _device(text: str) -> str:
    try:
        kind = torch.device(text).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, but got {text!r}")
    return text


# --- what is done ---


def show_demo(args: argparse.Namespace) -> None:
    demo.run(_writable(args.out), args.replicas)


def show_list(args: argparse.Namespace) -> None:
    parts: dict[str, dict[str, str]] = {
        "Data sets": {name: f"{title_of(name)}: {data_of(name).note}" for name in PROTOCOLS},
        "Methods": {name: f"{row.label}: {row.about}" for name, row in METHODS.items()},
        "Artefacts": {**{name: one.about for name, one in artefacts.ARTEFACTS.items()}, "all": artefacts.ABOUT_ALL},
    }
    width = max(len(name) for lines in parts.values() for name in lines)
    for title, lines in parts.items():
        print(title)
        for name, text in lines.items():
            print(f"  {name:{width}} {text}")


def run(args: argparse.Namespace) -> None:
    request = asked.request_of(args, args.dataset, args.method)
    with tempfile.TemporaryDirectory() if args.out is None else nullcontext(_writable(args.out)) as folder:
        found = _computed(request, Path(folder), args)
        if args.json:
            print(json.dumps(found.to_json()))
        else:
            tables.show(tables.results([found]))


def reproduce(args: argparse.Namespace) -> None:
    if args.address is not None and args.engine != "ray":
        raise UsageError("--address is for --engine ray, but --engine is local; add --engine ray, or leave it out")
    out, began = _writable(args.out), time.perf_counter()
    wanted = asked.wanted(args)
    every = list(dict.fromkeys(request for requests in wanted.values() for request in requests))
    done = {request: cell for request in every if (cell := finished(request, out)) is not None}
    say = _silent if args.quiet else _say
    missing = [request for request in every if request not in done]
    compute_all, place = (_side_by_side, "Ray") if args.engine == "ray" else (_in_turn, _chosen(args))
    if every:
        say(f"{len(every)} cells: {len(done)} finished, {len(missing)} to compute on {place}, into {out}")
    if "all" in args.artefacts:
        for line in costs.plan(wanted, done, (args.device or "cuda") if place == "Ray" else place):
            say(line)
    waiting = dict(wanted)
    _show_finished(args, waiting, done, say)
    with closing(compute_all(args, missing, out)) as found:
        for cell in found:
            done[cell.request] = cell
            _show_finished(args, waiting, done, say)
    if args.json:
        print(json.dumps([done[request].to_json() for request in every]))
    with _needing_pictures(out, say):
        say(f"wrote {_report(out)}")
    say(f"{time.perf_counter() - began:.0f} s in all")


def _show_finished(
    args: argparse.Namespace, waiting: dict[str, list[Request]], done: dict[Request, Cell], say: Callable[[str], None]
) -> None:
    """Tables and files of every artefact that now has all its cells; nobody should have to wait for the others."""
    ready = [name for name, requests in waiting.items() if all(request in done for request in requests)]
    for name in ready:
        requests, artefact = waiting.pop(name), artefacts.ARTEFACTS[name]
        if artefact.show is not None and not args.json:
            artefact.show([done[request] for request in requests])
        try:
            with _needing_pictures(args.out, say):
                for path in artefact.make(asked.comparable(args, name, requests, say), args.out / name):
                    say(f"wrote {path}")
        except UsageError as error:
            if "all" not in args.artefacts:
                raise
            say(f"no {name}: {error}")  # of some methods alone there may be nothing to show


@contextmanager
def _needing_pictures(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as missing:  # on a cluster, say; the results are safe
        say(f"no {missing.name} for pictures: pip install 'onepass[experiments]', then onepass report {out}")


def search(args: argparse.Namespace) -> None:
    wish = command.Asked(**{field.name: getattr(args, field.name) for field in fields(command.Asked)})
    out, device = _writable(args.out), _chosen(args)
    command.run(wish, out, device=device, json_wanted=args.json, progress=not args.quiet)


def write_report(args: argparse.Namespace) -> None:
    if args.port is not None and not args.live:
        raise UsageError("--port is for --live, which serves the page; add --live, or leave it out")
    try:
        print(_report(args.out)) if not args.live else _serve(args.out, args.port or 0)
    except ModuleNotFoundError as missing:
        raise UsageError(f"a report needs {missing.name}: pip install 'onepass[experiments]'") from missing


def _report(out: Path) -> Path:
    from onepass.experiments import report  # needs matplotlib

    return report.write(out)


def _serve(out: Path, port: int) -> None:
    from onepass.experiments import live

    live.serve(out, port)


Cells = Generator[Cell, None, None]


def _in_turn(
    args: argparse.Namespace, requests: list[Request], out: Path, before: int = 0, device: str | None = None
) -> Cells:
    say = _silent if args.quiet else _say
    for number, request in enumerate(requests, before + 1):
        say(f"[{number}/{before + len(requests)}] {_called(request)}")
        cell = _computed(request, out, args, device)
        say(f"    {_in_short(cell)}")
        yield cell


def _side_by_side(args: argparse.Namespace, requests: list[Request], out: Path) -> Cells:
    say = _silent if args.quiet else _say
    searches = [request for request in requests if METHODS[request.method].search is not None]
    alone = [request for request in requests if request not in searches]
    settings = {"device": args.device, "backend": args.backend, "data_dir": args.data_dir}
    with cluster.connect(args.address) as ray, closing(cluster.computed(alone, out, **settings)) as cells:
        for number, cell in enumerate(cells, 1):
            say(f"[{number}/{len(requests)}] {_called(cell.request)}: {_in_short(cell)}")
            yield cell
        device = cluster.device_of(ray, args.device) if searches else None
        yield from _in_turn(args, searches, out, len(alone), device)  # each fills the cluster by itself


def _called(request: Request) -> str:
    return ", ".join(filter(None, (request.variant.place, request.dataset, request.method)))


def _in_short(cell: Cell) -> str:
    return f"median {cell.summary.median:.4g}, {cell.summary.diverged} diverged, {cell.seconds:.1f} s"


def _computed(request: Request, out: Path, args: argparse.Namespace, device: str | None = None) -> Cell:
    progress = not args.quiet
    where = {"device": device or _chosen(args), "backend": args.backend, "address": getattr(args, "address", None)}
    return compute(request, out, data_dir=args.data_dir, progress=progress, **where)


def _chosen(args: argparse.Namespace) -> str:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{device!r} was asked for, but torch sees no CUDA device; use --device cpu")
    check_backend(args.backend, device)
    return device


def _writable(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        raise UsageError(
            f"--out must be a folder that can be written to, but {out} cannot: {error.strerror}"
        ) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
