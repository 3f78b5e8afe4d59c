"""Tables of texts, and four ways to write them down: Markdown, LaTeX, HTML, a terminal."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

NARROW = 76  # columns of a terminal


class Text(NamedTuple):
    """One field. ``under``: what stands below it on a terminal, and in brackets where there is no room for that.

    ``look``: its class on a page.
    """

    text: str
    bold: bool = False
    under: str | None = None
    look: str | None = None


class Grid(NamedTuple):
    title: str
    note: str
    head: list[str]
    body: list[list[Text]]


def to_markdown(grid: Grid) -> str:
    def written(field: Text) -> str:
        text = f"**{field.text}**" if field.bold else field.text
        return f"{text} ({field.under})" if field.under else text

    lines = [grid.head, ["---"] + ["---:"] * (len(grid.head) - 1)]
    lines += [list(map(written, row)) for row in grid.body]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{grid.title}** ({grid.note})\n\n{rows}\n"


def from_markdown(text: str) -> list[Grid]:
    """Tables that ``to_markdown`` wrote; what else there is in the text is left out.

    >>> grid = Grid("UCI Energy", "of two", ["method", "mean"], [[Text("Random"), Text("0.5", bold=True)]])
    >>> from_markdown(to_markdown(grid)) == [grid]
    True
    """
    found = []
    for title, note, table in re.findall(r"^\*\*(.*)\*\* \((.*)\)\n\n((?:\|.*\|\n)+)", text, re.MULTILINE):
        head, _, *body = ([field.strip() for field in line[1:-1].split("|")] for line in table.splitlines())
        found.append(Grid(title, note, head, [list(map(_from_markdown, row)) for row in body]))
    return found


def _from_markdown(field: str) -> Text:
    return Text(field.removeprefix("**").removesuffix("**"), bold=field.startswith("**"))


def to_latex(grid: Grid) -> str:
    r"""A ``tabular`` for the ``booktabs`` package."""

    def written(field: Text) -> str:
        text = field.text.replace("±", r"$\pm$").replace("_", r"\_").replace("–", "--")
        return rf"\textbf{{{text}}}" if field.bold else text

    lines = [" & ".join(map(written, row)) for row in [list(map(Text, grid.head)), *grid.body]]
    rows = " \\\\\n".join(lines[1:])
    columns = "l" + "r" * (len(grid.head) - 1)
    title = f"% {grid.title} ({grid.note})\n"
    return (
        rf"{title}\begin{{tabular}}{{{columns}}}"
        f"\n\\toprule\n{lines[0]} \\\\\n\\midrule\n{rows} \\\\\n\\bottomrule\n"
        "\\end{tabular}\n"
    )


def to_html(grid: Grid) -> str:
    def field(tag: str, text: Text) -> str:
        inside = html.escape(text.text)
        look = "" if text.look is None else f' class="{text.look}"'
        return f"<{tag}{look}>{f'<b>{inside}</b>' if text.bold else inside}</{tag}>"

    rows = ["".join(field("th", Text(name)) for name in grid.head)]
    rows += [field("th", row[0]) + "".join(field("td", text) for text in row[1:]) for row in grid.body]
    lines = [f"<tr>{row}</tr>" for row in rows]
    caption = f"<caption><strong>{html.escape(grid.title)}</strong> ({html.escape(grid.note)})</caption>"
    inside = "\n".join([f"<thead>{lines[0]}</thead>", "<tbody>", *lines[1:], "</tbody>"])
    return f'<table class="results">\n{caption}\n{inside}\n</table>\n'


def show(grids: Callable[[bool], Sequence[Grid]], legend: str, console: Any = None) -> None:
    """On a terminal, given what fits a narrow one or a wide one; as Markdown where rich is not installed."""
    try:
        console = console or terminal()
    except ImportError:
        print("\n".join(map(to_markdown, grids(False))))
        return
    for grid in grids(console.width < NARROW):
        console.print(_drawn(grid))
    console.print(f"[dim]{legend}[/dim]\n", highlight=False)


def terminal() -> Any:
    """rich's console; whose reader has seen enough is for the command line to notice."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Terminal()


def _drawn(grid: Grid) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    def field(text: Text) -> str:
        inside = f"[bold]{text.text}[/bold]" if text.bold else text.text
        return inside if text.under is None else f"{inside}\n[dim]{text.under}[/dim]"

    title = f"[bold]{grid.title}[/bold]\n{grid.note}"
    drawn = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(grid.head):
        drawn.add_column(name, justify="right" if i else "left", no_wrap=bool(i))
    for row in grid.body:
        drawn.add_row(*map(field, row))
    return drawn
