"""What the live page's server hands out, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.request import urlopen

import pytest

from onepass.cli import main
from onepass.experiments import live
from onepass.experiments.errors import UsageError
from tests.experiments.test_figures import made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[live.Server]:
    made(tmp_path)
    with live.Server(tmp_path) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def asked(server: live.Server, path: str, host: str | None = None) -> tuple[int, str]:
    connection = HTTPConnection(live.HERE, server.server_port)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_and_its_news(server: live.Server, tmp_path: Path) -> None:
    status, page = asked(server, "/")
    assert status == 200 and "UCI Energy" in page and "connect-src 'self'" in page
    news = json.loads(asked(server, "/state?seen=1")[1])
    assert news == {"version": 1, "main": None}
    made(tmp_path, "baydin")
    news = json.loads(asked(server, "/state?seen=1")[1])
    assert news["version"] == 2 and "Baydin" in news["main"] and "plotly" not in news["main"]
    assert json.loads(asked(server, "/state?seen=junk")[1])["main"] == news["main"]


@pytest.mark.parametrize(
    "path", ["/report.html", "/uci-energy/one-pass/cell.json", "/../../../../etc/passwd", "//etc/passwd", "/%2e%2e/x"]
)
def test_no_file_is_handed_out(server: live.Server, path: str) -> None:
    assert asked(server, path)[0] == 404


def test_other_names_of_this_machine_are_refused(server: live.Server) -> None:
    assert asked(server, "/", host="evil.example:80")[0] == 403
    assert asked(server, "/state?seen=0", host=f"localhost:{server.server_port}")[0] == 200


def test_nobody_else_on_the_network_can_ask(server: live.Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_mistakes(server: live.Server, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        live.serve(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=f"port {server.server_port} cannot be used .*another --port"):
        live.serve(tmp_path, server.server_port)


MISTAKES = {
    "--port 80": "--port is for --live",
    "--live --port 65536": "must be from 0 to 65535",
    "--live": "is no folder",
    "": "holds no finished runs",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_mistakes_are_told_in_one_line(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["report", str(tmp_path / "nowhere"), *options.split()])
    except SystemExit as end:
        code = end.code
    assert code == 2
    told = capsys.readouterr().err
    assert told.startswith("onepass: ") and told.count("\n") == 1 and MISTAKES[options] in told


def test_the_command_ends_with_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onepass", "report", "--live", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        with urlopen(line.split()[0]) as answer:
            assert "no finished runs so far" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "ended" in process.stdout.read()
        assert process.stderr.read() == ""
