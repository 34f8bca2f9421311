"""split.csv beside one's own images: given parts, groups that never cross parts, bad tables."""

import csv
from pathlib import Path

import common
from plumbing.data.splits import PARTS, parts_by_class
from tests.conftest import fails, members_of, parsed, run_all
from tests.own_images import FLAGS, write_images

import pytest
import torch

FILES = [f"{d}/{c}/{i}.png" for d in ("north", "south") for c in ("healthy", "ill") for i in range(10)]


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
    found = {name: set() for name in FILES}
    sources, targets = common.split(dataset, args)
    for client in sources + targets:
        start = 20 * client.name.startswith("south")
        for part in PARTS:
            for row in getattr(client, part).index.tolist():
                found[FILES[start + row]].add(part)
    return found


CLIENTS = [[], ["--clients-per-domain", "2"], ["--clients-per-domain", "2", "--dirichlet", "5"]]


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
    of_patient = [set() for _ in range(5)]
    for name, there in found.items():
        assert len(there) == 1
        of_patient[int(name[-5]) % 5] |= there
    assert all(len(there) == 1 for there in of_patient)
    assert of_patient[3] == {"test"} and set().union(*of_patient) == set(PARTS)


def clients_of(folder: Path, *flags) -> list[common.ClientData]:
    args = flags_of(folder, *flags)
    clients, _ = members_of(args)
    return clients


@pytest.mark.parametrize("patients", [3, 4, 5, 7])
def test_each_part_has_a_patient_of_a_small_site(folder, patients):
    """Sites of a few patients were refused at each seed."""
    write_split(folder, [(name, "", f"{name[:5]} {int(name[-5]) % patients}") for name in FILES])
    for seed in range(5):
        for client in clients_of(folder, "--seed", seed):
            sizes = [len(getattr(client, part)) for part in PARTS]
            assert min(sizes) >= 2 and sum(sizes) == 20
            assert patients == 3 or sizes[0] >= 8


@pytest.mark.parametrize("count, flags, expected", [
    (3, [], [1, 1, 1]), (5, [], [3, 1, 1]), (10, [], [8, 1, 1]), (10, ["--clients-per-domain", "2"], None),
])
def test_each_part_has_a_rare_class(folder, count, flags, expected):
    """Beside 60 images of the other one; its part of the test was empty."""
    write_images(folder, ("west",), ("healthy",), 60)
    write_images(folder, ("west",), ("ill",), count)
    for seed in range(5):
        ill = [0, 0, 0]
        for client in clients_of(folder, "--seed", seed, *flags):
            if client.name.startswith("west"):
                ill = [n + int(getattr(client, part).labels.sum()) for n, part in zip(ill, PARTS)]
        assert ill == expected if expected else min(ill) >= 1 and sum(ill) == count


def test_small_parts_have_turns_of_the_classes():
    """One test image of ten classes of three: the classes take turns by the seed, and none loses a third."""
    labels = torch.arange(30) % 10
    seen = set()
    for seed in range(20):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
        part = parts_by_class(order, labels, torch.arange(30), (0.8, 0.1, 0.1), {})
        assert part.bincount().tolist() == [24, 3, 3]
        seen |= set(labels[order[part == 2]].tolist())
    assert len(seen) == 10


def test_each_part_has_a_patient_of_a_rare_class():
    """Five patients with 16 images each, three of whom have two or three of the 8 ill ones."""
    labels = torch.zeros(80, dtype=torch.long)
    labels[[0, 1, 2, 16, 17, 18, 32, 33]] = 1
    patients = torch.arange(80) // 16
    for seed in range(20):
        order = torch.randperm(80, generator=torch.Generator().manual_seed(seed))
        part = parts_by_class(order, labels, patients, (0.8, 0.1, 0.1), {})
        assert part.bincount().tolist() == [48, 16, 16]
        assert all((labels[order[part == number]] == 1).any() for number in range(3))
        assert len({*zip(patients[order].tolist(), part.tolist())}) == 5


def test_a_table_says_what_each_client_has(folder, capsys):
    run_all("fedavg", flags_of(folder, "--rounds", "1"))
    said = capsys.readouterr().out.splitlines()
    assert "2 clients (north, south), 2 classes (healthy, ill), 32 training images" in said
    start = said.index("images to train/validate/test    healthy    ill    all")
    assert [line.split() for line in said[start + 1:start + 3]] == [
        ["north", "8/1/1", "8/1/1", "16/2/2"], ["south", "8/1/1", "8/1/1", "16/2/2"]]


def test_the_content_of_the_split_is_part_of_the_identity(folder):
    fingerprints = []
    for part in ("train", "test", "train"):
        write_split(folder, [("north/ill/0.png", part, "")])
        fingerprints.append(common.open_dataset(flags_of(folder)).content)
    assert fingerprints[0] != fingerprints[1]


TRAIN = [(name, "train", "") for name in FILES]
ILL = [(name, "train" if "/ill/" in name else PARTS[1 + int(name[-5]) % 2], "") for name in FILES]


@pytest.mark.parametrize("rows, words", [
    (TRAIN, "client north has 20/0/0 images .*it needs at least 2/1/1: give .*, or another split.csv"),
    (ILL, "the training images of folder:.* are of one class"),
])
def test_parts_without_images_or_of_one_class(folder, capsys, rows, words):
    write_split(folder, rows)
    fails(capsys, 1, words, run_all, "fedavg", flags_of(folder))
