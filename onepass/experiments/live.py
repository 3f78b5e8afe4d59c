"""``onepass report --live``: the page of a folder, served to this machine alone while a reproduction fills it."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from onepass.experiments import figures, report
from onepass.experiments.charts import CHARTS
from onepass.experiments.contents import Contents, contents, state
from onepass.experiments.errors import UsageError
from onepass.experiments.report import Picture

HERE = "127.0.0.1"
NAMES = {HERE, "localhost"}  # other names for this machine may be somebody else's trick


class Folder:
    """What is in it now, as a page. It is looked at when somebody asks, and made anew only if something changed."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.version = 0
        self._state: Any = None
        self._lock = threading.Lock()
        self._found = Contents([], [], [], [])
        self._pictures: dict[str, Picture] = {}
        self._main = ""

    def refresh(self) -> None:
        now = state(self.out)
        if now == self._state:
            return
        self._found = contents(self.out)
        self._pictures = {**undrawn(self._found), **report.studies(self.out)}
        self._main = report.main(self._found, self.out, self._pictures)
        self._state, self.version = now, self.version + 1

    def page(self) -> str:
        with self._lock:
            self.refresh()
            return report.page(self._found, self.out, self._pictures, live=self.version)

    def news(self, seen: int) -> dict[str, Any]:
        """What has come since version ``seen``; ``main`` is None if nothing has."""
        with self._lock:
            self.refresh()
            return {"version": self.version, "main": self._main if self.version != seen else None}


def undrawn(found: Contents) -> dict[str, Picture]:
    """Pictures of the figures that have no chart. The others are left to `report.write`: they take their time."""
    made = {}
    for name in figures.FIGURES:
        if name not in CHARTS:
            try:
                figure = figures.figure_of(name, found.drawn)
            except UsageError:
                continue
            made[name] = Picture(figures.rendered(figure, "png"), figure.get_figwidth() <= 6)
    return made


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, out: Path, port: int = 0) -> None:
        self.folder = Folder(out)
        super().__init__((HERE, port), Handler)

    @property
    def address(self) -> str:
        return f"http://{HERE}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """Two things can be asked for, and neither is a file."""

    server: Server

    def do_GET(self) -> None:
        asked, folder = urlsplit(self.path), self.server.folder
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif asked.path == "/":
            self._send("text/html", folder.page())
        elif asked.path == "/state":
            seen = parse_qs(asked.query).get("seen", [""])[0]
            self._send("application/json", json.dumps(folder.news(int(seen) if seen.isdecimal() else -1)))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page asks every other second."""


def serve(out: Path, port: int = 0) -> None:
    """Until Ctrl-C."""
    if not out.is_dir():
        raise UsageError(f"{out} is no folder; give what `onepass reproduce` has as --out, or begin that first")
    try:
        server = Server(out, port)
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {port} cannot be used ({error}); give another --port, or none") from error
    with server:
        print(f"{server.address}  follows {out}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nended; `onepass report` writes the page to a file", flush=True)
