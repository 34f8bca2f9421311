"""split.csv beside one's own images: given parts, groups that never cross parts, bad tables."""

import csv
from collections.abc import Callable
from pathlib import Path

import common
from plumbing.data.splits import (PARTS, dealt_to_parts, faults_of_parts, parts_by_class,
                                  placed_images)
from tests.conftest import fails, members_of, parsed, run_all
from tests.own_images import FLAGS, write_images

import pytest
import torch
from PIL import Image

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
    """A patient has images 0 and 5 of both classes, and so on; patient 3 of the other domain is another one.
    One image of patient 3 is given to the test: so are all of them. All images are used."""
    rows = [(name, "test" if name == "north/ill/3.png" else "", int(name[-5]) % 5) for name in FILES]
    write_split(folder, rows)
    found = parts(folder, *flags, "--seed", seed, "--split", "0.4/0.3/0.3")
    of_patient = {}
    for name, there in found.items():
        assert len(there) == 1
        of_patient.setdefault((name[:5], int(name[-5]) % 5), set()).update(there)
    assert len(of_patient) == 10 and all(len(there) == 1 for there in of_patient.values())
    assert of_patient["north", 3] == {"test"}
    for domain in ("north", "south"):
        assert set().union(*(of_patient[domain, i] for i in range(5))) == set(PARTS)


def test_patients_of_two_hospitals_are_parted_alike_but_by_themselves(folder):
    """Numbered from 1 in each; a hospital is parted as if it were alone, as on its own node."""
    write_split(folder, [(name, "", int(name[-5]) % 5) for name in FILES])
    there = {seed: parts(folder, "--seed", seed) for seed in range(6)}
    differ = [found for found in there.values()
              if any(found[name] != found[name.replace("north", "south")] for name in FILES[:20])]
    assert differ
    dataset = common.open_dataset(flags_of(folder))
    dataset.domains = dataset.domains[1:]
    (south,), _ = common.split(dataset, flags_of(folder))
    found = {FILES[20 + row] for row in south.test.index.tolist()}
    assert found == {name for name, of in there[0].items() if of == {"test"} and name.startswith("south")}


def put_deeper(folder: Path, below: Callable[[int], str]) -> None:
    for name in FILES:
        path = folder / name
        place = path.parent / below(int(path.stem))
        place.mkdir(parents=True, exist_ok=True)
        path.rename(place / path.name)


def placed_of(folder: Path, *flags) -> list:
    args = flags_of(folder, *flags)
    sources, targets = members_of(args)
    return [image for client in sources + targets for image in placed_images(client)]


@pytest.mark.parametrize("table", [False, True])
def test_folders_of_patients_stay_whole(folder, table):
    """<domain>/<class>/<patient>/<slice>, also with a table of some parts; patients have both classes."""
    put_deeper(folder, lambda i: f"p{i % 4}/left")
    if table:
        write_split(folder, [("south/ill/p2/left/2.png", "val")], ("file", "part"))
    for seed in range(4):
        placed, parts_of_patient = placed_of(folder, "--seed", seed), {}
        for image in placed:
            parts_of_patient.setdefault(image.group, set()).add(image.part)
        assert sorted(parts_of_patient) == [f"{d}: p{i}" for d in ("north", "south") for i in range(4)]
        assert all(len(there) == 1 for there in parts_of_patient.values()) and len(placed) == 40
        assert not table or parts_of_patient["south: p2"] == {"val"}


def test_a_folder_that_all_images_are_in_is_no_patient(folder):
    put_deeper(folder, lambda i: "images")
    assert {image.group for image in placed_of(folder)} == {""}
    assert not faults_of_parts(placed_of(folder), ("healthy", "ill"))


def test_two_folders_are_named_as_no_patients(folder):
    put_deeper(folder, lambda i: f"p{i % 2}")
    (said,) = faults_of_parts(placed_of(folder), ("healthy", "ill"))
    assert said.startswith("north, south: two folders are too few to be taken for patients")


@pytest.mark.parametrize("ill, others, expected", [(14, 46, True), (15, 45, False), (2, 58, False)])
def test_what_a_rare_class_is(ill, others, expected):
    """Less than half of an equal share, which is 15 of 60 images of two classes, and an image for each part:
    then it is dealt out by itself."""
    labels = torch.tensor([1] * ill + [0] * others)
    alone = set()
    for seed in range(30):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        part = parts_by_class(order, labels, torch.arange(60), (0.98, 0.01, 0.01))
        alone.add(min(int((labels[order[part == number]] == 1).sum()) for number in range(3)) > 0)
    assert (alone == {True}) == expected


@pytest.mark.parametrize("given", [False, True])
def test_equal_images_stay_in_one_part_and_are_told(folder, capsys, given):
    """By their pixels: the file may be another one. Where split.csv separates them, it is said with whom."""
    for i in range(5):
        Image.open(folder / f"north/ill/{i}.png").save(folder / f"north/ill/{i}.bmp")
    if given:
        write_split(folder, [("north/ill/3.png", "train"), ("north/ill/3.bmp", "test")], ("file", "part"))
    placed = placed_of(folder, "--seed", 1)
    assert "images have the same pixels as another one of their domain" in capsys.readouterr().err
    in_parts = {(image.pixels, image.part) for image in placed}
    assert len(in_parts) - len({image.pixels for image in placed}) == given  # how many have a second part
    leaks = [line for line in faults_of_parts(placed, ("healthy", "ill")) if "same pixels" in line]
    assert len(leaks) == given and all("trained on and tested: 1 of the " in line for line in leaks)


PATIENTS = [(name, "", f"{int(name[-5]) % 5}{name[6]}") for name in FILES]  # each is healthy or ill


@pytest.mark.parametrize("metric", ["accuracy", "f1"])
def test_parts_that_lack_a_class_are_named_and_kept(folder, capsys, metric):
    """Before the first round, under every metric, with patients and images of each class."""
    rows = []
    for name, _, group in PATIENTS:
        number = int(name[-5]) % 5
        part = PARTS[number % 2]
        if "/ill/" in name:
            part = "train" if number else "test"
        rows.append((name, part, group))
    write_split(folder, rows)
    run_all("fedavg", flags_of(folder, "--rounds", "1", "--metric", metric))
    said = capsys.readouterr().out
    table = [line.split() for line in said.splitlines() if line.startswith(("north", "south"))]
    assert table == [[d, "7/2/1", "6/4/0", "8/0/2", "14/4/2"] for d in ("north", "south")]
    words = ("north has no ill to validate; north has no healthy to test; south has no ill to validate; "
             "south has no healthy to test: give other parts in split.csv")
    assert words in said and said.index(words) < said.index("best validation round")
    assert "count as different ones: 0h, 0i, 1h" in said
    run = folder.parent / "run"
    assert (run / "split.txt").read_text() in said
    kept = list(csv.DictReader((run / "parts.csv").open()))
    assert {(row["file"], row["part"], row["group"]) for row in kept} == {
        (name, part, f"{name[:5]}: {group}") for name, part, group in rows}
    assert all((row["client"], row["class"]) == tuple(row["file"].split("/")[:2]) for row in kept)


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
        part = parts_by_class(order, labels, torch.arange(30), (0.8, 0.1, 0.1))
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
        part = parts_by_class(order, labels, patients, (0.8, 0.1, 0.1))
        assert part.bincount().tolist() == [48, 16, 16]
        assert all((labels[order[part == number]] == 1).any() for number in range(3))
        assert len({*zip(patients[order].tolist(), part.tolist())}) == 5


def test_a_limit_takes_other_images_with_another_seed_and_keeps_what_is_known(folder):
    """Parts, groups, names and labels go with their images."""
    rows = [(name, PARTS[int(name[-5]) % 3], f"p{name[-5]}") for name in FILES]
    write_split(folder, rows)
    part_of, chosen = {name: part for name, part, _ in rows}, []
    whole = {}
    for d in common.open_dataset(flags_of(folder)).domains:
        for origin, image in zip(d.origin, d.images):
            whole[origin.file] = image
    for seed in (0, 1):
        north, _ = common.open_dataset(flags_of(folder, "--limit", "9", "--seed", seed)).domains
        for origin, image, label, (part, _) in zip(north.origin, north.images, north.labels, north.given):
            assert torch.equal(image, whole[origin.file]) and PARTS[part] == part_of[origin.file]
            c = ("healthy", "ill")[label]
            assert origin.file.split("/")[1] == c and origin.group == f"p{origin.file[-5]}"
        by_group = [(origin.group, int(number)) for origin, (_, number) in zip(north.origin, north.given)]
        assert len(set(by_group)) == len({group for group, _ in by_group})
        chosen.append({origin.file for origin in north.origin})
    assert chosen[0] != chosen[1] and len(chosen[0]) == 9


@pytest.mark.parametrize("sizes, filled, expected", [
    ([5, 5], set(), [0, 2]),  # the test comes before the validation
    ([5, 5, 5], set(), [0, 2, 1]),
    ([5, 5], {2}, [0, 1]),
    ([1, 1, 1, 1, 1, 1, 1, 1, 1, 1], set(), [0] * 8 + [1, 2]),
])
def test_small_parts_fill_in_their_order(sizes, filled, expected):
    assert dealt_to_parts(sizes, (0.8, 0.1, 0.1), filled) == expected


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
