"""All results in a folder as one HTML page that needs nothing beside itself: no network, no file, no font."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from plotly.offline import get_plotlyjs

from onepass.experiments import figures, sections, writing
from onepass.experiments.artefacts import ARTEFACTS
from onepass.experiments.charts import ON_DARK, Chart, Panel, chart_of
from onepass.experiments.contents import Contents, contents
from onepass.experiments.errors import UsageError
from onepass.experiments.methods import METHODS
from onepass.experiments.panels import SAMPLE, TUNED, style_of
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell
from onepass.version import __version__

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
        "loss at which plain training ends from there; a cross was lost. Thin lines show where tuning took the values, "
        "from a small open circle to a filled one in the colour of its own final loss. Good values form a narrow "
        "valley, and tuning draws the others into it.",
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
        "begin, in the colour of their final test loss; dotted was lost. Where every weight has a learning rate of "
        "its own, the line is their median.",
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

NOTHING = "holds no finished runs; `onepass run` and `onepass reproduce` put them there with --out"
# Whatever the page holds, it cannot load anything: browsers keep to this.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src {}; "
    "form-action 'none'; base-uri 'none'"
)


class Picture(NamedTuple):
    """A figure. ``kept``: its files, seen from the page, if there are any."""

    png: bytes
    narrow: bool = False
    kept: Sequence[str] = ()


def write(out: Path, target: Path | None = None) -> Path:
    """The page of all finished cells under ``out``, as ``out/report.html`` unless ``target`` says otherwise.

    Beside it every figure as PNG and PDF, in ``figures``. What could not be shown is told on the page and on stderr.
    """
    found, target = contents(out), target or out / "report.html"
    others = studies(out, target.parent)
    if not found.cells and not others:
        raise UsageError(" ".join([f"{out} {NOTHING}", *(f"({note})" for note in found.notes[:1])]))
    for note in found.notes:
        print(f"onepass: {' '.join(note.split())}", file=sys.stderr)
    text = page(found, out, {**pictures(found.drawn, target.parent / "figures"), **others})
    beside = target.with_name(f".{target.name}.partial")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, target)
    return target


def pictures(cells: Sequence[Cell], folder: Path) -> dict[str, Picture]:
    """Every figure of `figures.FIGURES` that has something to show, as files in that folder."""
    made = {}
    for name in figures.FIGURES:
        try:
            figure = figures.figure_of(name, cells)
        except UsageError:  # nothing here that it could show
            continue
        folder.mkdir(parents=True, exist_ok=True)
        kept = figures.save(figure, folder / name)
        relative = [f"{folder.name}/{path.name}" for path in kept]
        made[name] = Picture(kept[0].read_bytes(), figure.get_figwidth() <= 6, relative)
    return made


def studies(out: Path, beside: Path | None = None) -> dict[str, Picture]:
    """What artefacts that are not of `figures.FIGURES` have left in the folder, with links from a page ``beside``."""
    found = {}
    for name, artefact in ARTEFACTS.items():
        png = out / f"{name}.png"
        if artefact.figure not in figures.FIGURES and png.is_file():
            kept = [] if beside is None else [path for path in (png, png.with_suffix(".pdf")) if path.is_file()]
            found[name] = Picture(png.read_bytes(), kept=[os.path.relpath(path, beside) for path in kept])
    return found


def page(found: Contents, out: Path, drawn: Mapping[str, Picture], live: int | None = None) -> str:
    """``live`` is the version of what is shown, if the page is to ask for later ones."""
    title = f"onepass: {sections.listed(title_of(cell.request.dataset) for cell in found.cells) or out.name}"
    policy = POLICY.format("'none'" if live is None else "'self'")
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_own('page.css')}{keys()}</style>"
    )
    status = "" if live is None else '<p id="live" class="soft" role="status"></p>'
    body = [
        f'<header><h1>One-pass tuning: results</h1><p class="soft">{ABOUT}</p>{status}</header>',
        f"<main>{main(found, out, drawn)}</main>",
        f"<footer>Written by onepass {escape(__version__)}. The paper: {PAPER}.</footer>",
        _data({"onDark": ON_DARK, "live": live}, ' id="page"'),
        f'<script type="text/plain" id="plotly">{_plotly()}</script>',
        f"<script>{_own('page.js')}</script>",
    ]
    inside = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{inside}\n</body>\n</html>\n'


def main(found: Contents, out: Path, drawn: Mapping[str, Picture]) -> str:
    """What changes as results come in, in parts."""
    cells, section = found.cells, sections.section
    figured = dict(_figures(found, out, drawn))
    parts = {"notes": sections.notes(found.notes), "unfinished": sections.unfinished(found.unfinished)}
    if cells:
        parts["settings"] = section("What was run", sections.settings(cells))
        parts["results"] = section("Results", sections.results(cells))
        parts["chips"] = sections.chips(cells)
    parts |= {name: section(_caption(name)[0], inside) for name, inside in figured.items()}
    if cells:
        parts["methods"] = section("Methods", sections.methods(cells))
        parts["runs"] = section("Runs", sections.runs(cells) + sections.commands(cells, out))
    if len(parts) == 2:
        parts["empty"] = f"<p>{escape(str(out))} holds no finished runs so far.</p>"
    headings = {"results": "Results", **{name: _caption(name)[0] for name in figured}, "runs": "Runs"}
    parts = {"contents": sections.contents({name: text for name, text in headings.items() if name in parts}), **parts}
    return "\n".join(_part(name, inside) for name, inside in parts.items() if inside)


def _part(name: str, inside: str) -> str:
    """Its print tells a page that follows whether it has changed."""
    mark = hashlib.sha256(inside.encode()).hexdigest()[:12]
    return f'<section id="{name}" data-part="{name}" data-print="{mark}">{inside}</section>'


def _caption(name: str) -> tuple[str, str]:
    about = ARTEFACTS[name].about.split(";")[0] if name in ARTEFACTS else name  # without the usual size
    return CAPTIONS.get(name) or (about[:1].upper() + about[1:], "")


def _figures(found: Contents, out: Path, drawn: Mapping[str, Picture]) -> Iterator[tuple[str, str]]:
    """A chart where there is one, with its picture for browsers without scripts; else the picture."""
    for name in dict.fromkeys([*CAPTIONS, *figures.FIGURES, *drawn]):
        chart, picture = chart_of(name, found.drawn), drawn.get(name)
        if chart is None and picture is None:
            continue
        alt = f"{_caption(name)[0]}: {sections.listed(title_of(cell.request.dataset) for cell in found.cells)}"
        image = _image(picture, alt) if picture is not None else ""
        inside = image if chart is None else _chart(name, chart) + f"<noscript>{image}</noscript>"
        table = "" if name in figures.FIGURES else _table(out / f"{name}.md")
        narrow = ' class="narrow"' if picture is not None and picture.narrow else ""
        yield name, f"<figure{narrow}>{inside}<figcaption>{_legend(name, picture)}</figcaption></figure>{table}"


def _legend(name: str, picture: Picture | None) -> str:
    about = escape(_caption(name)[1])
    if picture is None or not picture.kept:
        return about
    links = (f'<a href="{escape(quote(file))}">{Path(file).suffix[1:].upper()}</a>' for file in picture.kept)
    return f"{about} For a paper: {', '.join(links)}."


def _image(picture: Picture, alt: str) -> str:
    address = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
    return f'<div class="scroll picture"><img src="{address}" alt="{escape(alt)}"></div>'


def _table(file: Path) -> str:
    """What an artefact has left beside its picture."""
    return sections.grids(writing.from_markdown(file.read_text(encoding="utf-8"))) if file.is_file() else ""


def _chart(name: str, chart: Chart) -> str:
    height = "" if chart.height is None else f' style="--height: {chart.height}px"'
    kind = "panels wide" if chart.wide else "panels"
    every = "".join(_panel(f"{name}-{place}", panel) for place, panel in enumerate(chart.panels))
    return f'{_choice(chart.choices)}<div class="{kind}"{height}>{every}</div>'


def _choice(methods: Sequence[str]) -> str:
    if not methods:
        return ""
    options = (
        f'<option value="{name}"{" selected" if name == TUNED else ""}>{escape(METHODS[name].label)}</option>'
        for name in methods
    )
    return f'<p class="choose"><label>Method: <select>{"".join(options)}</select></label></p>'


def _panel(name: str, panel: Panel) -> str:
    title = escape(panel.title)
    grow = f'<button type="button" class="grow" aria-expanded="false" aria-label="{title}: larger">&#x2922;</button>'
    chart = f'<div class="chart" id="chart-{name}" role="figure" aria-label="{title}"></div>'
    spec = _data({"data": panel.data, "layout": panel.layout})
    return f'<div class="panel"><div class="title"><h3>{title}</h3>{grow}</div>{chart}{spec}</div>'


def _data(value: Any, attributes: str = "") -> str:
    """``<`` cannot end the script from inside."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json"{attributes}>{text}</script>'


def _own(name: str) -> str:
    return (files("onepass.experiments") / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """Its whole script, packed: to two fifths of its size."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def keys() -> str:
    """The look of each method in CSS: its colour, on white and on dark, and its dashes."""

    def rule(method: str, colour: str) -> str:
        parts = DASHED[style_of(method).get("linestyle", "-")]
        stops = ", ".join(f"{colour if drawn else 'transparent'} {begin}px {end}px" for drawn, begin, end in parts)
        return f".key-{method} {{ --stroke: repeating-linear-gradient(90deg, {stops}) }}"

    colours = {method: style_of(method)["color"] for method in METHODS}
    light = "\n".join(rule(method, colour) for method, colour in colours.items())
    dark = "\n".join(rule(method, ON_DARK[colour]) for method, colour in colours.items() if colour in ON_DARK)
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


# Line style -> whether it is drawn from one pixel to another; then it begins anew.
DASHED: dict[str, list[tuple[bool, int, int]]] = {
    "-": [(True, 0, 12)],
    "--": [(True, 0, 7), (False, 7, 10)],
    ":": [(True, 0, 3), (False, 3, 6)],
    "-.": [(True, 0, 7), (False, 7, 9), (True, 9, 11), (False, 11, 13)],
}
