"""split.csv beside one's own images: given parts, groups that never cross parts, bad tables."""

import csv
from pathlib import Path

import common
from plumbing.splits import PARTS
from tests.conftest import fails, parsed, run_all
from tests.own_images import FLAGS, write_images

import pytest

FILES = [f"{d}/{c}/{i}.png" for d in ("north", "south") for c in ("healthy", "ill") for i in range(10)]


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_images(tmp_path / "images")


def write_split(folder: Path, rows: list[tuple], head=("file", "part", "group")) -> None:
    with open(folder / "split.csv", "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def flags_of(folder: Path, *flags) -> common.Args:
    return parsed("fedavg", "--dataset", f"folder:{folder}", "--scale", "smoke", "--precision", "fp32",
                  "--data", folder.parent / "data", "--out", folder.parent / "run", "--limit", "0", *FLAGS,
                  *flags)


def parts(folder: Path, *flags) -> dict[str, set[str]]:
    """{file: the parts of all clients and targets that it is in}."""
    args = flags_of(folder, *flags)
    dataset = common.open_dataset(args)
    first = {d.name: i * 20 for i, d in enumerate(dataset.domains)}
    found = {name: set() for name in FILES}
    sources, targets = common.split(dataset, args)
    for client in sources + targets:
        for part in PARTS:
            data = getattr(client, part)
            for row in data.index.tolist():
                start = 0 if args.clients else first[client.name.rpartition("-")[0] or client.name]
                found[FILES[start + row]].add(part)
    return found


CLIENTS = [[], ["--clients-per-domain", "2"], ["--clients", "2", "--domain-mix", "0"],
           ["--clients-per-domain", "2", "--dirichlet", "5"]]


@pytest.mark.parametrize("flags", CLIENTS)
def test_given_parts_are_used(folder, flags):
    given = {name: PARTS[(int(name[-5]) + 1) // 4] for name in FILES}  # 0-2, 3-6, 7-9
    write_split(folder, list(given.items()), ("file", "part"))
    assert parts(folder, *flags) == {name: {part} for name, part in given.items()}


@pytest.mark.parametrize("flags", CLIENTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_groups_never_cross_parts(folder, flags, seed):
    """A patient has images 0 and 5 of both classes in both domains, and so on. One image of patient 3 is
    given to the test: so are all of them. All images are used, in about the shares of --split."""
    rows = [(name, "test" if name == "north/ill/3.png" else "", int(name[-5]) % 5) for name in FILES]
    write_split(folder, rows)
    found = parts(folder, *flags, "--seed", seed, "--split", "0.4/0.3/0.3")
    of_patient = {}
    for name, there in found.items():
        assert len(there) == 1
        of_patient.setdefault(int(name[-5]) % 5, set()).update(there)
    assert all(len(there) == 1 for there in of_patient.values())
    assert of_patient[3] == {"test"} and set().union(*of_patient.values()) == set(PARTS)


def test_without_groups_the_rest_is_cut_as_always(folder):
    plain = parts(folder)
    write_split(folder, [("north/ill/0.png", "", "")])
    assert parts(folder) == plain


def test_the_content_of_the_split_is_part_of_the_identity(folder):
    fingerprints = []
    for part in ("train", "test", "train"):
        write_split(folder, [("north/ill/0.png", part, "")])
        fingerprints.append(common.open_dataset(flags_of(folder)).content)
    assert fingerprints[0] != fingerprints[1]


TRAIN = [(name, "train", "") for name in FILES]
ILL = [(name, "train" if "/ill/" in name else PARTS[1 + int(name[-5]) % 2], "") for name in FILES]


@pytest.mark.parametrize("rows, words", [
    (TRAIN, "client north has 20/0/0 images .*it needs at least 2/1/1: .*, or another split.csv"),
    (ILL, "the training images of folder:.* are of one class"),
])
def test_parts_without_images_or_of_one_class(folder, capsys, rows, words):
    write_split(folder, rows)
    fails(capsys, 1, words, run_all, "fedavg", flags_of(folder))
