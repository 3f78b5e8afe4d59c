"""What a report says in words and tables, as HTML. All text from files is escaped here."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from onepass.experiments import tables, writing
from onepass.experiments.contents import Unfinished, in_words
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell


def section(heading: str, inside: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{inside}"


def contents(headings: Mapping[str, str]) -> str:
    links = "".join(f'<a href="#{escape(name)}">{escape(heading)}</a>' for name, heading in headings.items())
    return f'<nav aria-label="Contents">{links}</nav>'


def notes(lines: Sequence[str]) -> str:
    inside = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<aside aria-label="What to know about these results">{inside}</aside>' if lines else ""


def chips(cells: Sequence[Cell]) -> str:
    """A button a method, which is the legend of all charts too."""
    used = [name for name in METHODS if any(cell.request.method == name for cell in cells)]
    hint = "Click: off and on. Double-click: this one alone."
    buttons = "".join(
        f'<button type="button" class="key-{name}" data-method="{name}" aria-pressed="true" title="{hint}">'
        f"{escape(METHODS[name].label)}</button>"
        for name in used
    )
    every = "".join(f'<button type="button" data-every="{do}">{text}</button>' for do, text in EVERY.items())
    return every + buttons if len(used) > 1 else ""


EVERY = {"on": "all", "off": "none"}


def settings(found: Sequence[Cell]) -> str:
    """Where runs differ, all that occur."""
    of_versions = (f"{name} {version}" for cell in found for name, version in cell.versions.items())
    splits = ("default" if cell.request.split is None else f"number {cell.request.split}" for cell in found)
    resumed = sum(cell.resumed for cell in found)
    partly = (
        f"; {resumed} of them (* below) went on after an interruption, and only the last part is counted"
        if resumed
        else ""
    )
    return described(
        {
            "Data sets": listed(title_of(cell.request.dataset) for cell in found),
            "Methods": listed(METHODS[cell.request.method].label for cell in found),
            "Random starts": listed(str(cell.request.replicas) for cell in found),
            "Weight steps": listed(str(cell.request.steps) for cell in found),
            "Split of the data": listed(splits),
            "Seed": listed(str(cell.request.seed) for cell in found),
            "Device": listed(cell.device for cell in found),
            "Versions": listed(of_versions),
            "Time": f"{duration(sum(cell.seconds for cell in found))} for {len(found)} runs{partly}",
        }
    )


def described(lines: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines.items()) + "</dl>"


def results(found: Sequence[Cell]) -> str:
    every = tables.results(found)
    return grids(map(tables.grid, every)) + f'<p class="soft">{escape(tables.legend(every))}</p>'


def grids(every: Iterable[writing.Grid]) -> str:
    return "".join(f'<div class="scroll">{writing.to_html(grid)}</div>' for grid in every)


def methods(found: Sequence[Cell]) -> str:
    used = [name for name in METHODS if any(cell.request.method == name for cell in found)]
    lines = (
        f'<dt class="key-{name}">{escape(METHODS[name].label)}</dt><dd>{escape(METHODS[name].about)}</dd>'
        for name in used
    )
    return f"<dl>{''.join(lines)}</dl>"


def unfinished(begun: Sequence[Unfinished]) -> str:
    """Runs that are being computed, or were interrupted."""
    lines = "".join(f"<dt>{escape(_begun(one))}</dt><dd>{_bar(one)}{escape(in_words(one))}</dd>" for one in begun)
    return section("Not finished yet", f"<dl>{lines}</dl>") if begun else ""


def _begun(one: Unfinished) -> str:
    return f"{title_of(one.dataset)}, {METHODS[one.method].label}"


def _bar(one: Unfinished) -> str:
    if one.step is None or one.steps is None:
        return ""
    return f'<progress max="{one.steps}" value="{one.step}" aria-label="weight steps"></progress> '


def runs(found: Sequence[Cell]) -> str:
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


def commands(found: Sequence[Cell], out: Path) -> str:
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


def listed(texts: Iterable[str]) -> str:
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
