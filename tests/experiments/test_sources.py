"""Files are found in order, downloaded from a real server, checked always, and never left half done."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import re
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from onepass.experiments import datasets, sources
from onepass.experiments.sources import DataError

PATH = "uci/energy/data.txt"
CONTENT = bytes(range(256)) * 40
CHECKSUMS = {PATH: hashlib.sha256(CONTENT).hexdigest()}


class Server:
    """Serves a folder, truly or with a fault, on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fault, self.asked = folder, "", list[str]()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class Handler(BaseHTTPRequestHandler):
    def __init__(self, server: Server, *arguments: object) -> None:
        self.site = server
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.site.asked.append(self.path[1:])
        file = self.site.folder / self.path[1:]
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        self.send_response(200)
        if self.site.fault != "truncated, of unknown length":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self._send(content)

    def _send(self, content: bytes) -> None:
        half = len(content) // 2
        if self.site.fault == "corrupted":
            content = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        elif self.site.fault:
            content = content[:half]
        self.wfile.write(content)
        if self.site.fault == "stalled":
            self.wfile.flush()
            time.sleep(1.0)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for each test, and nothing from the environment."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    for name in ("ONEPASS_DATA", "ONEPASS_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Server]]:
    servers: list[Server] = []

    def start(folder: Path) -> Server:
        servers.append(Server(folder))
        monkeypatch.setenv("ONEPASS_MIRROR", servers[-1].url)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(tmp_path: Path, serve: Callable[[Path], Server]) -> Server:
    """A mirror with one small file."""
    write(tmp_path / "served" / PATH, CONTENT)
    return serve(tmp_path / "served")


def write(file: Path, content: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def failure(data_dir: Path | None = None, checksums: dict[str, str] = CHECKSUMS, path: str = PATH) -> str:
    with pytest.raises(DataError) as caught:
        sources.fetch(path, data_dir, checksums=checksums)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_folders_are_searched_in_order(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named, cache = tmp_path / "given", tmp_path / "named", home / ".cache" / "onepass"
    monkeypatch.setenv("ONEPASS_DATA", str(named))
    assert sources.folders(given) == [given, named, cache]
    assert sources.locate(PATH, given) is None
    for folder in (cache, named, given):
        assert sources.locate(PATH, given) != folder / PATH
        write(folder / PATH, CONTENT)
        assert sources.locate(PATH, given) == folder / PATH
    assert sources.fetch(PATH, checksums=CHECKSUMS) == named / PATH


def test_home_is_understood(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_DATA", "~/sets")
    assert sources.folders("~/mine")[:2] == [home / "mine", home / "sets"]


def test_downloads_go_to_the_folder_given_then_named_then_home(
    tmp_path: Path, home: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sources.fetch(PATH, checksums=CHECKSUMS) == home / ".cache" / "onepass" / PATH
    (home / ".cache" / "onepass" / PATH).unlink()
    monkeypatch.setenv("ONEPASS_DATA", str(tmp_path / "named"))
    assert sources.fetch(PATH, checksums=CHECKSUMS) == tmp_path / "named" / PATH
    (tmp_path / "named" / PATH).unlink()
    assert sources.fetch(PATH, tmp_path / "given", checksums=CHECKSUMS) == tmp_path / "given" / PATH
    assert files(tmp_path / "given") == [PATH]
    assert (tmp_path / "given" / PATH).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written_is_passed_over(
    tmp_path: Path, home: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEPASS_DATA", str(write(tmp_path / "a file", b"")))
    assert sources.fetch(PATH, checksums=CHECKSUMS) == home / ".cache" / "onepass" / PATH


def test_a_folder_asked_for_must_be_writable(tmp_path: Path, server: Server) -> None:
    message = failure(write(tmp_path / "a file", b""))
    assert PATH in message and "cannot be written" in message and "--data-dir" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_are_respected(tmp_path: Path, home: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "Permission denied" in failure(tmp_path / "locked")
    monkeypatch.setenv("ONEPASS_DATA", str(tmp_path / "locked"))
    assert sources.fetch(PATH, checksums=CHECKSUMS) == home / ".cache" / "onepass" / PATH


FAULTS = {
    "truncated": r"it ended after 5120 of 10240 bytes",
    "truncated, of unknown length": rf"5120 bytes, has sha256 \w{{64}}, but must have {CHECKSUMS[PATH]}",
    "corrupted": rf"10240 bytes, has sha256 \w{{64}}, but must have {CHECKSUMS[PATH]}",
    "stalled": r"timed out",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_download_is_noticed_and_not_kept(
    fault: str, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TIMEOUT", 0.3)
    server.fault = fault
    message = failure(tmp_path / "data")
    assert re.search(FAULTS[fault], message)
    assert f"{server.url}/{PATH}" in message and str(tmp_path / "data" / PATH) in message and "ONEPASS_DATA" in message
    assert files(tmp_path / "data") == []
    server.fault = ""
    assert sources.fetch(PATH, tmp_path / "data", checksums=CHECKSUMS).read_bytes() == CONTENT


def test_a_file_the_server_lacks(tmp_path: Path, server: Server) -> None:
    (server.folder / PATH).unlink()
    assert "HTTP 404 Not Found" in failure(tmp_path / "data")
    assert files(tmp_path / "data") == []


@pytest.mark.parametrize(
    ("mirror", "reason"),
    [("http://127.0.0.1:{port}", "Connection refused"), ("nowhere", "unknown url type"), ("http://", "no host given")],
)
def test_offline_says_what_to_do(mirror: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = mirror.format(port=unused_port())
    monkeypatch.setenv("ONEPASS_MIRROR", mirror)
    monkeypatch.setenv("ONEPASS_DATA", str(tmp_path / "named"))
    message = failure(tmp_path / "given")
    for folder in sources.folders(tmp_path / "given"):
        assert str(folder) in message
    assert f"could not be fetched from {mirror.rstrip('/')}/{PATH}: {reason}" in message
    assert f"copy it to {tmp_path / 'given' / PATH}" in message and "set ONEPASS_DATA" in message


def test_without_a_mirror_the_public_source_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "UCI", f"http://127.0.0.1:{unused_port()}/UCI_Datasets")
    assert "/UCI_Datasets/energy/data/data.txt: Connection refused" in failure(tmp_path)


def test_an_interrupted_download_leaves_nothing(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(url: str) -> Iterator[bytes]:
        yield CONTENT[:100]
        assert len(files(tmp_path / "data")) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sources.fetch(PATH, tmp_path / "data", checksums=CHECKSUMS)
    assert files(tmp_path / "data") == []


def test_many_at_once(tmp_path: Path, server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: sources.fetch(PATH, tmp_path / "data", checksums=CHECKSUMS), range(8)))
    assert set(found) == {tmp_path / "data" / PATH} and files(tmp_path / "data") == [PATH]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / PATH, CONTENT[:-1])
    actual = hashlib.sha256(CONTENT[:-1]).hexdigest()
    message = failure(tmp_path)
    assert str(file) in message and actual in message and CHECKSUMS[PATH] in message and "delete it" in message
    assert file.exists()  # it is the user's


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_large_downloads_show_their_progress(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources.fetch(PATH, tmp_path / "small", checksums=CHECKSUMS)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sources, "LARGE", 100)
    sources.fetch(PATH, tmp_path / "log", checksums=CHECKSUMS)
    title = f"downloading data.txt from {server.url.removeprefix('http://')} (0.0 MB)"
    assert capsys.readouterr().err == title + "\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sources, "CHUNK", 1000)
    sources.fetch(PATH, tmp_path / "terminal", checksums=CHECKSUMS)
    shown = terminal.getvalue()
    assert shown.startswith(title) and shown.endswith(f"\r{title} 100 %\n")


MEMBERS = {f"cifar-10-batches-bin/data_batch_{number}.bin": bytes([number]) * 3073 for number in (1, 2)}


def pack(file: Path, members: dict[str, bytes]) -> dict[str, str]:
    """An archive with some members, one that must not be unpacked and two that want to go elsewhere."""
    link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(file, "w:gz") as archive:
        archive.addfile(link)
        for name, content in {
            **members,
            "cifar-10-batches-bin/readme.html": b"",
            "../outside": b"",
            "/tmp/x": b"",
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in MEMBERS.items()}
    return checksums | {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}


@pytest.fixture
def archive(server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the server has an archive, as if it were the public source."""
    monkeypatch.delenv("ONEPASS_MIRROR")
    monkeypatch.setattr(sources, "CIFAR", server.url)
    return server.folder / "cifar-10-binary.tar.gz"


def test_an_archive_is_fetched_once_and_unpacked_with_care(tmp_path: Path, server: Server, archive: Path) -> None:
    checksums = pack(archive, MEMBERS)
    for name, content in MEMBERS.items():
        assert sources.fetch(name, tmp_path / "data", checksums=checksums).read_bytes() == content
    assert files(tmp_path / "data") == sorted(MEMBERS) and not (tmp_path / "outside").exists()
    assert server.asked == [archive.name]


def test_a_bad_archive_leaves_nothing(tmp_path: Path, server: Server, archive: Path) -> None:
    checksums = pack(archive, MEMBERS)
    server.fault = "corrupted"
    message = failure(tmp_path / "data", checksums, next(iter(MEMBERS)))
    assert checksums[archive.name] in message and files(tmp_path / "data") == []


def test_an_archive_without_a_wanted_file(tmp_path: Path, archive: Path) -> None:
    first, second = MEMBERS
    checksums = pack(archive, {first: MEMBERS[first]})
    assert f"the archive lacks {second}" in failure(tmp_path / "data", checksums, second)


def test_real_files_have_the_published_checksums(real_data: Path) -> None:
    here = [path for path in sources.published() if sources.locate(path, real_data)]
    assert len(here) >= 8 * 42 + 4 + 3
    for path in here:
        assert sources.fetch(path, real_data) == real_data / path


def test_real_data_through_the_network(real_data: Path, tmp_path: Path, serve: Callable[[Path], Server]) -> None:
    server = serve(real_data)
    fetched, known = (datasets.load("uci-energy", data_dir=folder, split=3) for folder in (tmp_path, real_data))
    for ours, theirs in zip(fetched.train + fetched.test, known.train + known.test, strict=True):
        assert torch.equal(ours, theirs)
    names = [f"uci/energy/{name}.txt" for name in ("data", "index_test_3", "index_train_3")]
    assert sorted(server.asked) == files(tmp_path) == names
    datasets.load("uci-energy", data_dir=tmp_path, split=3)
    assert len(server.asked) == 3


def test_every_file_has_a_source_that_cannot_change() -> None:
    pinned = re.compile(r"https://raw\.githubusercontent\.com/[\w-]+/[\w-]+/[0-9a-f]{40}/\S+\.(txt|gz)")
    archive = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    for path, checksum in sources.published().items():
        assert re.fullmatch("[0-9a-f]{64}", checksum)
        if not path.startswith("cifar-10-batches-"):
            url = sources.public_source(path)
            assert pinned.fullmatch(url) or url == archive
    assert {path.partition("/")[0] for path in sources.published() if path.endswith(".bin")} == set(sources.ARCHIVES)


def test_what_has_no_source_says_so(tmp_path: Path) -> None:
    assert "no public source" in failure(tmp_path, sources.published(), "cifar-10-batches-py/test_batch")


def test_standard_library_alone() -> None:
    tree = ast.parse(Path(sources.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= set(sys.stdlib_module_names)
