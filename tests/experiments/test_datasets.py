"""Every data set: sizes, order, normalisation, and one clear error for what is wrong."""

from __future__ import annotations

import gzip
import math
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from onepass.experiments import datasets
from onepass.experiments.datasets import DATASETS, Data, load
from onepass.experiments.sources import DataError

Trust = Callable[[Path], dict[str, str]]

# name -> folder, inputs, rows of the three parts, distinct rows in the paper's order
UCI: dict[str, tuple[str, int, tuple[int, int, int], int]] = {
    "uci-boston": ("bostonHousing", 13, (364, 91, 51), 506),
    "uci-concrete": ("concrete", 8, (742, 185, 103), 1005),
    "uci-energy": ("energy", 8, (614, 78, 76), 768),
    "kin8nm": ("kin8nm", 8, (5898, 1475, 819), 8192),
    "uci-naval": ("naval-propulsion-plant", 16, (8593, 2148, 1193), 11934),
    "uci-power": ("power-plant", 4, (6889, 1722, 957), 9527),
    "uci-wine": ("wine-quality-red", 11, (1151, 288, 160), 1359),
    "uci-yacht": ("yacht", 6, (222, 55, 31), 308),
}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder but the one a test names, and nothing to download from."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ONEPASS_MIRROR", (tmp_path / "empty").as_uri())
    monkeypatch.delenv("ONEPASS_DATA", raising=False)


def parts(data: Data) -> tuple[tuple[Tensor, ...], ...]:
    return data.train, data.valid, data.test


def rows(data: Data) -> tuple[int, ...]:
    return tuple(len(part[0]) for part in parts(data))


def known(data: Data, which: int) -> Tensor:
    """Training and validation rows together, precisely."""
    return torch.cat([data.train[which], data.valid[which]]).double()


def assert_normalised(values: Tensor, dim: tuple[int, ...] = (0,)) -> None:
    deviation = values.std(dim, correction=0)
    assert values.mean(dim).abs().max() < 1e-6
    assert (((deviation - 1).abs() < 1e-6) | (deviation < 1e-12)).all()


def raw_table(folder: Path, name: str) -> NDArray[np.float64]:
    """Inputs and target as they stand in the file."""
    directory, inputs, _, _ = UCI[name]
    return np.loadtxt(folder / "uci" / directory / "data.txt")[:, : inputs + 1]


def raw_index(folder: Path, name: str, file: str) -> NDArray[np.int64]:
    return np.loadtxt(folder / "uci" / UCI[name][0] / file, dtype=np.int64)


def test_names() -> None:
    assert list(DATASETS) == [*UCI, "fashion-mnist", "penn-treebank", "cifar-10", "digits", "diabetes"]


@pytest.mark.parametrize("name", DATASETS)
def test_every_entry_is_complete(name: str) -> None:
    dataset = DATASETS[name]
    assert dataset.kind in {"regression", "classification", "text"}
    assert dataset.title and dataset.note and "\n" not in dataset.note
    assert dataset.splits == (20 if name in UCI else 0)


@pytest.mark.parametrize("name", UCI)
def test_uci_in_the_order_of_the_paper(name: str, real_data: Path) -> None:
    _, inputs, sizes, distinct = UCI[name]
    data = load(name, data_dir=real_data)
    assert rows(data) == sizes
    for x, y in parts(data):
        assert x.dtype == y.dtype == torch.float32 and x.shape == (len(x), inputs) and y.shape == (len(x), 1)
    order = raw_index(real_data, name, "paper_permutation.txt")
    assert len(set(order)) == distinct
    # The plain reference: in float64, all at once.
    table = raw_table(real_data, name)[order]
    fit = table[: sizes[0] + sizes[1]]
    deviation = np.where(np.ptp(fit, axis=0) == 0, 1, fit.std(axis=0))
    expected = torch.from_numpy((table - fit.mean(axis=0)) / deviation).float()
    actual = torch.cat([torch.cat(part, dim=1) for part in parts(data)])
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    assert data.target_scale == pytest.approx(deviation[-1], rel=1e-12)


@pytest.mark.parametrize("name", UCI)
@pytest.mark.parametrize("split", [0, 7, 19])
def test_clean_splits(name: str, split: int, real_data: Path) -> None:
    data = load(name, data_dir=real_data, split=split)
    table = raw_table(real_data, name)
    train, test = (raw_index(real_data, name, f"index_{part}_{split}.txt") for part in ("train", "test"))
    assert sorted([*train, *test]) == list(range(len(table)))  # a partition
    assert rows(data)[0] + rows(data)[1] == len(train) and rows(data)[2] == len(test)
    _, _, (train_size, valid_size, _), _ = UCI[name]
    assert abs(rows(data)[1] - len(train) * valid_size / (train_size + valid_size)) <= 0.5
    for which in (0, 1):
        assert_normalised(known(data, which))
    mean = table[train, -1].mean()
    torch.testing.assert_close(
        data.test[1].double() * data.target_scale + mean, torch.from_numpy(table[test, -1:]), atol=1e-4, rtol=1e-6
    )
    fitted = known(data, 1).flatten() * data.target_scale + mean
    np.testing.assert_allclose(np.sort(fitted.numpy()), np.sort(table[train, -1]), atol=1e-4, rtol=1e-6)


def test_splits_are_fixed_and_differ(real_data: Path) -> None:
    first, again, other = (load("uci-energy", data_dir=real_data, split=split) for split in (0, 0, 1))
    assert rows(first) == (613, 78, 77)
    assert torch.equal(first.train[0], again.train[0]) and not torch.equal(first.train[0], other.train[0])


def test_constant_columns_become_zero(real_data: Path) -> None:
    inputs = known(load("uci-naval", data_dir=real_data), 0)
    assert inputs[:, [8, 11]].abs().max() < 1e-6
    assert inputs.abs().max() < 10


def test_fashion_mnist(real_data: Path) -> None:
    data = load("fashion-mnist", data_dir=real_data)
    assert rows(data) == (50_000, 10_000, 10_000)
    for x, y in parts(data):
        assert x.dtype == torch.float32 and x.shape[1:] == (784,) and y.dtype == torch.int64
    assert known(data, 1).long().bincount().tolist() == [6000] * 10
    assert data.test[1].bincount().tolist() == [1000] * 10
    assert data.train[1][:4].tolist() == [9, 0, 0, 3]
    assert_normalised(known(data, 0))


def test_penn_treebank(real_data: Path) -> None:
    data = load("penn-treebank", data_dir=real_data)
    assert rows(data) == (929_589, 73_760, 82_430)
    tokens = [part[0] for part in parts(data)]
    assert all(part.dtype == torch.int64 and part.ndim == 1 for part in tokens)
    assert tokens[0].unique().tolist() == list(range(10_000)) and max(int(part.max()) for part in tokens) == 9_999
    assert tokens[0][:25].tolist() == list(range(25))  # numbered by first appearance; the first 24 words differ
    for part, name in zip(tokens, ("train", "valid", "test"), strict=True):
        text = (real_data / "ptb" / f"ptb.{name}.txt").read_text()
        assert int((part == 24).sum()) == text.count("\n")  # <eos>


def test_digits_need_no_file() -> None:
    data = load("digits")
    assert rows(data) == (1097, 350, 350)
    assert data.train[0].dtype == torch.float32 and data.train[1].dtype == torch.int64
    assert data.train[0].shape[1:] == (64,) and data.train[1].shape == (1097,)
    assert float(known(data, 0).min()) == 0 and float(known(data, 0).max()) == 1
    assert torch.equal(load("digits").test[1], data.test[1])
    assert set(data.test[1].tolist()) == set(range(10))


def test_diabetes_needs_no_file() -> None:
    data = load("diabetes")
    assert rows(data) == (354, 44, 44) and data.test[0].shape == (44, 10) and data.test[1].shape == (44, 1)
    for which in (0, 1):
        assert_normalised(known(data, which))
    assert 70 < data.target_scale < 85


def test_no_random_number_is_taken_from_others() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    load("digits")
    assert (torch.rand(1), np.random.rand()) == expected


@pytest.mark.parametrize("name", ["digits", "diabetes"])
def test_without_scikit_learn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'onepass\[experiments\]'"):
        load(name)


ERRORS: list[tuple[str, Any, str]] = [
    ("uci-enrgy", None, r"data set must be one of uci-boston, .*, but got 'uci-enrgy'; did you mean uci-energy\?"),
    ("zebra", None, r"data set must be one of .* diabetes, but got 'zebra'$"),
    ("uci-energy", 20, r"split must be None or between 0 and 19 for uci-energy, but got 20"),
    ("uci-energy", -1, r"split must be None or between 0 and 19 for uci-energy, but got -1"),
    ("uci-energy", 1.0, r"split must be None or between 0 and 19 for uci-energy, but got 1\.0"),
    ("digits", 0, r"split must be None \(it has no numbered splits\) for digits, but got 0"),
]


@pytest.mark.parametrize(("name", "split", "message"), ERRORS)
def test_bad_arguments(name: str, split: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, split=split)


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in {"digits", "diabetes"}])
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^(uci|fashion-mnist|ptb|cifar-10-batches-bin)/\S+ is missing .*ONEPASS_DATA"):
        load(name, data_dir=tmp_path)


def yacht(folder: Path, shape: tuple[int, int] = (308, 7), order: str = "\n".join(map(str, range(308)))) -> Path:
    """A made set in the shape of the smallest UCI one, or in another."""
    (folder / "uci" / "yacht").mkdir(parents=True)
    np.savetxt(folder / "uci" / "yacht" / "data.txt", np.random.RandomState(0).rand(*shape))
    (folder / "uci" / "yacht" / "paper_permutation.txt").write_text(order)
    return folder


def test_a_made_set_is_read(tmp_path: Path, trusted: Trust) -> None:
    trusted(yacht(tmp_path))
    assert rows(load("uci-yacht", data_dir=tmp_path)) == (222, 55, 31)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": (307, 7)}, r"yacht/data\.txt must hold 308 x 7 numbers, but holds 307 x 7"),
        ({"shape": (308, 8)}, r"yacht/data\.txt must hold 308 x 7 numbers, but holds 308 x 8"),
        ({"order": "1\n2\n"}, r"paper_permutation\.txt must hold 308 x 1 numbers, but holds 2 x 1"),
        ({"order": "308\n" * 308}, r"paper_permutation\.txt must hold row numbers below 308"),
        ({"order": "first\n" * 308}, r"paper_permutation\.txt must hold rows of numbers: "),
    ],
)
def test_wrong_tables_are_named(settings: dict[str, Any], message: str, tmp_path: Path, trusted: Trust) -> None:
    trusted(yacht(tmp_path, **settings))
    with pytest.raises(DataError, match=message):
        load("uci-yacht", data_dir=tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"\0\0\x08\x03short"), gzip.compress(b"long" * 99)[:-9]],
    ids=["no gzip", "no idx", "truncated"],  # gzip writes the time, so that content is no name
)
def test_wrong_image_files_are_named(content: bytes, tmp_path: Path, trusted: Trust) -> None:
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz").write_bytes(content)
    trusted(tmp_path)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz (must hold 60000 x 28 x 28|is not a whole gzip)"):
        load("fashion-mnist", data_dir=tmp_path)


def idx(shape: tuple[int, ...], value: int = 0) -> bytes:
    """A whole file of one value, as Fashion-MNIST's are."""
    header = bytes([0, 0, 8, len(shape)]) + b"".join(struct.pack(">I", length) for length in shape)
    return header + bytes([value]) * math.prod(shape)


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
WHOLE = {IMAGES: (60_000, 28, 28), LABELS: (60_000,)}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, idx((60_000, 28, 28))[:-1], "must hold 60000 x 28 x 28 bytes in idx format, but does not"),
        (IMAGES, idx((60_000, 28, 28)) + b"0", "must hold 60000 x 28 x 28 bytes"),
        (IMAGES, idx((60_000, 28, 27)), "must hold 60000 x 28 x 28 bytes"),
        (IMAGES, idx((10_000, 28, 28)), "must hold 60000 x 28 x 28 bytes"),
        (LABELS, idx((10_000,)), "must hold 60000 bytes in idx format, but does not"),
        (LABELS, idx((60_000, 1)), "must hold 60000 bytes in idx format, but does not"),
        (LABELS, idx((60_000,), 10), "must hold labels from 0 to 9, but holds 10"),
    ],
    ids=["truncated", "too long", "shape", "the other part", "labels", "axes", "label"],
)
def test_wrong_fashion_mnist_files_are_named(
    name: str, content: bytes, message: str, tmp_path: Path, trusted: Trust
) -> None:
    (tmp_path / "fashion-mnist").mkdir()
    for file, shape in WHOLE.items():
        written = content if file == name else idx(shape)
        (tmp_path / "fashion-mnist" / file).write_bytes(gzip.compress(written, 1))
    trusted(tmp_path)
    with pytest.raises(DataError, match=rf"^fashion-mnist/{re.escape(name)} {message}"):
        load("fashion-mnist", data_dir=tmp_path)


def test_a_truncated_label_file_is_named(tmp_path: Path, trusted: Trust) -> None:
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / IMAGES).write_bytes(gzip.compress(idx(WHOLE[IMAGES]), 1))
    (tmp_path / "fashion-mnist" / LABELS).write_bytes(gzip.compress(idx(WHOLE[LABELS]), 1)[:-9])
    trusted(tmp_path)
    with pytest.raises(DataError, match=r"^fashion-mnist/train-labels-idx1-ubyte\.gz is not a whole gzip file"):
        load("fashion-mnist", data_dir=tmp_path)


def write_texts(folder: Path, train: str, valid: str, test: str) -> None:
    (folder / "ptb").mkdir()
    for part, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / "ptb" / f"ptb.{part}.txt").write_text(text)


def test_a_word_outside_the_vocabulary(tmp_path: Path, trusted: Trust) -> None:
    write_texts(tmp_path, " a b \n b c \n", " a \n", " zebra \n")
    trusted(tmp_path)
    with pytest.raises(DataError, match="outside its training text, which has no <unk>, but has 'zebra'"):
        load("penn-treebank", data_dir=tmp_path)


def test_a_word_outside_the_vocabulary_counts_as_unknown(tmp_path: Path, trusted: Trust) -> None:
    write_texts(tmp_path, " a <unk> \n b a \n", " yak b \n", " a zebra <unk> \n")
    trusted(tmp_path)
    data = load("penn-treebank", data_dir=tmp_path)
    assert [part[0].tolist() for part in parts(data)] == [[0, 1, 2, 3, 0, 2], [1, 3, 2], [0, 1, 1, 2]]


# CIFAR-10, made: 20 images a file
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def made_images() -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    random = np.random.RandomState(0)
    return [
        (random.randint(0, 256, (20, 3072)).astype(np.uint8), random.randint(0, 10, 20).astype(np.uint8)) for _ in NAMES
    ]


def write_binary(folder: Path) -> None:
    (folder / "cifar-10-batches-bin").mkdir(parents=True)
    for name, (pixels, labels) in zip(NAMES, made_images(), strict=True):
        content = np.concatenate([labels[:, None], pixels], axis=1).tobytes()
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(content)


def python_2_pickle(pixels: NDArray[np.uint8], labels: NDArray[np.uint8]) -> bytes:
    """What ``cPickle`` of Python 2 wrote, as in the real files: byte strings, and numpy by its names of that time."""
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(b"J" + struct.pack("<i", length) for length in pixels.shape) + b"t"
    values = b"T" + struct.pack("<i", pixels.size) + pixels.tobytes()
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    state = b"(K\x01" + shape + kind + b"\x89" + values + b"tb"
    return b"\x80\x02}(U\x04data" + array + state + b"U\x06labels" + numbers + b"u."


def python_3_pickle(pixels: NDArray[np.uint8], labels: NDArray[np.uint8]) -> bytes:
    return pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=4)


def write_pickled(folder: Path, write: Callable[[Any, Any], bytes] = python_2_pickle) -> None:
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    for name, (pixels, labels) in zip(NAMES, made_images(), strict=True):
        (folder / "cifar-10-batches-py" / name).write_bytes(write(pixels, labels))


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "CIFAR_ROWS", 20)


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "binary": write_binary,
    "pickled by Python 2": write_pickled,
    "pickled by Python 3": lambda folder: write_pickled(folder, python_3_pickle),
}


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cifar_in_every_layout(layout: str, tmp_path: Path, trusted: Trust) -> None:
    LAYOUTS[layout](tmp_path)
    trusted(tmp_path)
    data = load("cifar-10", data_dir=tmp_path)
    assert rows(data) == (90, 10, 20)
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*made_images(), strict=True))
    images = torch.from_numpy(pixels.reshape(-1, 3, 32, 32)).double()
    std, mean = torch.std_mean(images[:100], dim=(0, 2, 3), correction=0, keepdim=True)
    expected = ((images - mean) / std).float()
    torch.testing.assert_close(torch.cat([part[0] for part in parts(data)]), expected)
    assert torch.cat([part[1] for part in parts(data)]).tolist() == labels.tolist()
    assert data.train[0].dtype == torch.float32 and data.train[1].dtype == torch.int64
    assert_normalised(known(data, 0), (0, 2, 3))


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch attacked",)


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({b"data": Attack()}), r"data_batch_1 is not a pickled CIFAR-10 file: it asks for \w+\.system"),
        (pickle.dumps({b"labels": [1]}), r"data_batch_1 is not a pickled CIFAR-10 file: b'data'"),
        (b"nothing of the kind", r"data_batch_1 is not a pickled CIFAR-10 file: "),
        (python_2_pickle(*made_images()[0])[:-40], r"data_batch_1 is not a pickled CIFAR-10 file: "),
        (python_2_pickle(np.zeros((19, 3072), np.uint8), np.zeros(19, np.uint8)), r"must hold 20 images of 3072"),
        (python_2_pickle(np.zeros((20, 3072), np.uint8), np.full(20, 10, np.uint8)), r"with labels 0 to 9"),
    ],
    ids=["attack", "incomplete", "no pickle", "truncated", "too few", "labels"],
)
def test_bad_pickles_are_refused(
    content: bytes, message: str, tmp_path: Path, trusted: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pickled(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(content)
    trusted(tmp_path)
    with pytest.raises(DataError, match=message):
        load("cifar-10", data_dir=tmp_path)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize(("size", "message"), [(3073 * 19, "must hold 20 images"), (3000, "records of 3073 bytes")])
def test_bad_binary_files_are_named(size: int, message: str, tmp_path: Path, trusted: Trust) -> None:
    write_binary(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(bytes(size))
    trusted(tmp_path)
    with pytest.raises(DataError, match=rf"test_batch\.bin .*{message}"):
        load("cifar-10", data_dir=tmp_path)
