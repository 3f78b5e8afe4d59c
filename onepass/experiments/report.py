"""All results in a folder as one HTML page that needs nothing beside itself: no network, no script, no font."""

from __future__ import annotations

import base64
import math
import os
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from onepass.experiments import figures, tables, writing
from onepass.experiments.methods import METHODS
from onepass.experiments.panels import SAMPLE
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell, UsageError, cells
from onepass.version import __version__

LARGEST_SVG = 1_000_000  # bytes; a PNG where there would be more

ABOUT = "What came of many random starts, trained plainly and tuned while they trained."
PAPER = (
    "Clarke, Oldewage, Hernández-Lobato: Scalable One-Pass Optimisation of High-Dimensional Weight-Update "
    "Hyperparameters by Implicit Differentiation. ICLR 2022, arXiv:2110.10461"
)

# Figure -> its heading, and what to see in it.
CAPTIONS = {
    "demo": (
        "Where the values go",
        "Each large dot is a random start, at its learning rate and its weight decay or momentum; its colour is the "
        "loss at which plain training ends from there. Dark is good, a cross was lost. Thin lines show where tuning "
        "took the values, from a small open circle to a filled one in the colour of its own final loss. Good values "
        "form a narrow valley, and tuning draws the others into it.",
    ),
    "curves": (
        "Median test loss over time",
        "The median over all starts at each step, in a band of one bootstrap standard error to either side. Lower and "
        "earlier is better. Starts that are lost are left out from then on. Where only the best of every few starts "
        "counts, only those are shown, although all had to be trained.",
    ),
    "cdfs": (
        "Final test losses of all starts",
        "How large a share of the starts ends at or below a given test loss. A curve that rises far to the left is "
        "good; one that rises steeply says that it hardly matters where one starts. Where a curve stays below 1, the "
        "rest were lost, or lie beyond the right edge.",
    ),
    "learning-rates": (
        "Learning rates over time",
        f"Up to {SAMPLE} starts of each method that tunes the learning rate, spread evenly over where they "
        "begin, in the colour of their final test loss: dark is good, dotted was lost. Where every weight has a "
        "learning rate of its own, the line is their median.",
    ),
    "search-curves": (
        "Searches over time",
        "The lowest test loss seen so far, over wall-clock time: of many starts trained side by side, and of searches. "
        "Bands are one bootstrap standard error. Of Bayesian optimisation it is the median of its repetitions, which "
        "share the machine. A search is led by validation losses: it does not know these test losses, and what it "
        "hands out in the end may be a little worse.",
    ),
    "runtimes": (
        "What a run costs",
        "Time of a whole run by the clock, for each start: all are trained together, so that it is the time of all "
        "divided by their number. A run is cut into parts, one from each look at the test loss to the next, and each "
        "part is taken for the whole: what is drawn is the distribution over parts, and at the right stands how its "
        "median compares with Random's. The first part has the preparation in it and can lie beyond the right edge; a "
        "mean to the right of its median shows it. The looks themselves are not counted.",
    ),
}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5b6670; --line: #d9dee3; --back: #fff; --box: #f5f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8eb; --soft: #9aa5ae; --line: #39424a; --back: #14181b; --box: #1d2328 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 70rem; color: var(--ink); background: var(--back);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .3rem }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line) }
p, figcaption { max-width: 46rem }
.soft, figcaption, caption, footer { color: var(--soft) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 1rem 0 }
dt { color: var(--soft) }
dd { margin: 0 }
.scroll { overflow-x: auto; margin: 1rem 0 1.5rem; overflow-wrap: normal }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .4rem }
caption strong { color: var(--ink) }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th:first-child, .runs :is(:first-child, :nth-child(2), :last-child) { text-align: left }
thead th { color: var(--soft); font-weight: 600; border-bottom-width: 2px }
tbody th { font-weight: 500 }
tbody tr:hover { background: var(--box) }
figure { margin: 0 }
figure .scroll { background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: .8rem }
figure img { display: block; width: 100%; min-width: 38rem; height: auto }
figure.narrow img { max-width: 40rem; min-width: 0; margin: 0 auto }
pre { background: var(--box); border-radius: .4rem; padding: .8rem; overflow-x: auto; font-size: .85rem }
summary { cursor: pointer }
footer { margin-top: 3rem; padding-top: .8rem; border-top: 1px solid var(--line); font-size: .9rem }
"""


def write(out: Path, target: Path | None = None) -> Path:
    """The page of all finished cells under ``out``, as ``out/report.html`` unless ``target`` says otherwise."""
    found = list(cells(out))
    if not found:
        raise UsageError(
            f"{out} holds no finished runs; `onepass run` and `onepass reproduce` put them there with --out"
        )
    target = target or out / "report.html"
    beside = target.with_name(f".{target.name}.partial")
    beside.write_text(page(found, out), encoding="utf-8")
    os.replace(beside, target)
    return target


def page(found: Sequence[Cell], out: Path) -> str:
    title = f"onepass: {_listed(title_of(cell.request.dataset) for cell in found)}"
    parts = [
        f'<header><h1>One-pass tuning: results</h1><p class="soft">{ABOUT}</p></header>',
        "<main>",
        _section("What was run", _settings(found)),
        _section("Results", _results(found)),
        *_figures(found),
        _section("Methods", _methods(found)),
        _section("Runs", _runs(found) + _commands(found, out)),
        "</main>",
        f"<footer>Written by onepass {escape(__version__)}. The paper: {PAPER}.</footer>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _section(heading: str, inside: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>\n{inside}</section>"


def _settings(found: Sequence[Cell]) -> str:
    """Where runs differ, all that occur."""
    versions = (f"{name} {version}" for cell in found for name, version in cell.versions.items())
    splits = ("default" if cell.request.split is None else f"number {cell.request.split}" for cell in found)
    resumed = sum(cell.resumed for cell in found)
    partly = (
        f"; {resumed} of them (* below) went on after an interruption, and only the last part is counted"
        if resumed
        else ""
    )
    lines = {
        "Data sets": _listed(title_of(cell.request.dataset) for cell in found),
        "Methods": _listed(METHODS[cell.request.method].label for cell in found),
        "Random starts": _listed(str(cell.request.replicas) for cell in found),
        "Weight steps": _listed(str(cell.request.steps) for cell in found),
        "Split of the data": _listed(splits),
        "Seed": _listed(str(cell.request.seed) for cell in found),
        "Device": _listed(cell.device for cell in found),
        "Versions": _listed(versions),
        "Time": f"{duration(sum(cell.seconds for cell in found))} for {len(found)} runs{partly}",
    }
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines.items()) + "</dl>"


def _results(found: Sequence[Cell]) -> str:
    every = tables.results(found)
    written = (f'<div class="scroll">{writing.to_html(tables.grid(table))}</div>' for table in every)
    return "".join(written) + f'<p class="soft">{escape(tables.legend(every))}</p>'


def _figures(found: Sequence[Cell]) -> Iterable[str]:
    for name, (heading, about) in CAPTIONS.items():
        try:
            figure = figures.figure_of(name, found)
        except UsageError:  # nothing here that it could show
            continue
        narrow = ' class="narrow"' if figure.get_figwidth() <= 6 else ""
        alt = f"{heading}: {_listed(title_of(cell.request.dataset) for cell in found)}"
        image = f'<img src="{_data_uri(figure)}" alt="{escape(alt)}">'
        inside = f'<div class="scroll">{image}</div>\n<figcaption>{escape(about)}</figcaption>'
        yield _section(heading, f"<figure{narrow}>{inside}</figure>")


def _data_uri(figure: Figure) -> str:
    """As an image of its own: SVGs inside the page would share their ids."""
    kind, content = "svg+xml", figures.rendered(figure, "svg")
    if len(content) > LARGEST_SVG:
        kind, content = "png", figures.rendered(figure, "png")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _methods(found: Sequence[Cell]) -> str:
    used = [METHODS[name] for name in METHODS if any(cell.request.method == name for cell in found)]
    return "<dl>" + "".join(f"<dt>{escape(row.label)}</dt><dd>{escape(row.about)}</dd>" for row in used) + "</dl>"


def _runs(found: Sequence[Cell]) -> str:
    head = ["data set", "method", "starts", "steps", "diverged", "guard went back", "seconds", "device"]
    rows = [
        [
            title_of(cell.request.dataset),
            METHODS[cell.request.method].label,
            str(cell.request.replicas),
            str(cell.request.steps),
            str(sum(math.isnan(loss) for loss in cell.test)),
            str(sum(cell.returns)),
            f"{cell.seconds:.1f}" + ("*" if cell.resumed else ""),
            cell.device,
        ]
        for cell in found
    ]
    body = "\n".join(_row("td", row) for row in rows)
    table = f'<table class="runs"><thead>{_row("th", head)}</thead>\n<tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _row(tag: str, fields: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in fields) + "</tr>"


def _commands(found: Sequence[Cell], out: Path) -> str:
    lines = "\n".join(escape(command(cell, out)) for cell in found)
    about = "The commands that compute these runs. On another device or with other versions, numbers differ a little."
    return f"<details><summary>Commands</summary><p>{about}</p><pre>{lines}</pre></details>"


def command(cell: Cell, out: Path) -> str:
    asked = cell.request
    split = "" if asked.split is None else f" --split {asked.split}"
    return (
        f"onepass run {asked.dataset} {asked.method} --replicas {asked.replicas} --steps {asked.steps} "
        f"--seed {asked.seed}{split} --out {shlex.quote(str(out))}"
    )


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def duration(seconds: float) -> str:
    """
    >>> duration(12.34), duration(75), duration(7384)
    ('12.3 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
