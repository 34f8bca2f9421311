"""Images of one's own, --dataset folder:PATH: what is read, what is noticed, every kind of bad folder,
runs."""

import dataclasses
import os
import re
import resource
import shutil
import unicodedata
from pathlib import Path

import common
from plumbing.data.catalog import named
from plumbing.run.runfolder import folder_of
from plumbing.run.several import known_domains, targets_of
from reproduce import predict
from tests import small_datasets
from tests.conftest import ROOT, fails, parsed, run_all, stops, to_rgb, write_files
from tests.machinery.test_decoding import times
from tests.own_images import FLAGS, write_images
from tests.page_outputs import programs

import numpy as np
import pytest
from PIL import Image, ImageOps


def load(folder: Path, size: int = 16):
    """What common.open_dataset makes of it, decoded beside it."""
    return small_datasets.load(folder.parent, f"folder:{folder}", size=size)


def test_domains_classes_and_images_are_sorted_by_name(folder):
    write_images(folder, ("east",), ("ill", "healthy"), 3)
    domains, classes = load(folder)
    assert classes == ("healthy", "ill")
    assert [d.name for d in domains] == ["east", "north", "south"]
    assert domains[0].labels.tolist() == [0] * 3 + [1] * 3
    for d in domains:
        expected = [to_rgb(file.read_bytes(), 16) for file in sorted((folder / d.name).rglob("*.png"))]
        assert np.array_equal(d.images.permute(0, 2, 3, 1).numpy(), np.stack(expected))


def test_what_is_no_image_is_named_and_what_is_hidden_is_not(folder, capsys):
    hidden = (".git/a/b.png", "north/.thumbs/b.png", "north/ill/._0.png", "__MACOSX/a/b.png")
    write_files(folder, dict.fromkeys(("north/ill/notes.txt", "table.csv", *hidden), "x"))
    domains, _ = load(folder)
    assert [len(d.labels) for d in domains] == [20, 20]
    said = capsys.readouterr().err
    assert "files that are no images were left out; 1 in all: north/ill/notes.txt" in said


def test_a_class_that_a_domain_lacks_is_told_and_the_others_keep_their_numbers(folder, capsys):
    write_images(folder, ("east",), ("ill", "unclear"), 3)
    for _ in range(2):  # also where the cache is there
        domains, classes = load(folder)
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.endswith("south has no images of unclear")
    assert classes == ("healthy", "ill", "unclear")
    assert [sorted(set(d.labels.tolist())) for d in domains] == [[1, 2], [0, 1], [0, 1]]


def test_a_class_that_is_almost_another_is_told(folder, capsys):
    write_images(folder, ("east", "west"), ("Health", "grade1"), 3)
    write_images(folder, ("west",), ("il",), 3)
    load(folder)
    said = capsys.readouterr().err
    assert "in all: west alone has il: is ill meant?, " in said
    assert "grade1 meant" not in said and "Health: is" not in said  # two domains have it


def test_an_image_in_two_domains_is_told(folder, capsys):
    (folder / "south" / "ill" / "copy.png").write_bytes((folder / "north" / "ill" / "3.png").read_bytes())
    load(folder)
    said = capsys.readouterr().err
    assert "with what another trains on; 1 in all: south/ill/copy.png is north/ill/3.png" in said


def test_an_added_and_a_changed_image_are_noticed(folder):
    load(folder)
    before = times(folder.parent)
    load(folder)
    assert len(before) == 1 and times(folder.parent) == before  # it is decoded once
    image = folder / "south" / "ill" / "0.png"
    shutil.copyfile(folder / "north" / "healthy" / "1.png", image)
    shutil.copyfile(image, folder / "south" / "ill" / "new.png")
    (_, south), _ = load(folder)
    assert np.array_equal(south.images[10].permute(1, 2, 0).numpy(), to_rgb(image.read_bytes(), 16))
    assert len(south.labels) == 21


def test_two_images_that_change_places_are_noticed_and_a_copy_is_the_same(folder, tmp_path):
    """Of one size and one time; the copy has other times, and other names of the folders around it."""
    ours = [folder / "north" / c / "0.bmp" for c in ("ill", "healthy")]
    for color, path in zip((10, 200), ours):
        Image.new("RGB", (8, 8), (color,) * 3).save(path)
        os.utime(path, (1, 1))

    def content(place: Path) -> str:
        args = parsed("fedavg", "--dataset", f"folder:{place}", "--image-size", "16",
                      "--data", tmp_path / "data")
        return common.open_dataset(args).content
    first = content(folder)
    assert content(shutil.copytree(folder, tmp_path / "elsewhere" / "images")) == first
    ours[0].rename(tmp_path / "away")
    ours[1].rename(ours[0])
    (tmp_path / "away").rename(ours[1])
    assert content(folder) != first


def closed_places(folder: Path) -> None:
    (folder / "north" / "ill" / "\x1b[31m").symlink_to("nowhere")
    (folder / "south" / "away").symlink_to(folder / "south")
    os.mkfifo(folder / "south" / "ill" / "p.png")


def no_letters(folder: Path) -> None:
    (folder / "south").rename(folder / os.fsdecode(b"s\xfcd"))


def parts_above(folder: Path) -> None:
    (folder / "south").rename(folder / "Test")


def dicom_alone(folder: Path) -> None:
    for file in folder.rglob("*.png"):
        file.rename(file.with_suffix(".dcm"))


def not_readable(folder: Path) -> None:
    whole = (folder / "north" / "ill" / "4.png").read_bytes()
    (folder / "north" / "ill" / "4.png").write_bytes(whole[:-40])
    (folder / "south" / "ill" / "3.png").write_bytes(b"no image")


@pytest.mark.parametrize("change, code, words", [
    (parts_above, 2, "the folders Test are where those of domains are expected: bring their images into"),
    (dicom_alone, 2, "no images; there are 40 .dcm files: convert them to PNG or JPEG .DICOM: dcmj2pnm"),
    (no_letters, 2, r"a domain or class cannot have the name 's\\udcfcd' here; rename it"),
    (closed_places, 1, r"3 entries are no files .*: north/ill/\\x1b\[31m, south/away, south/ill/p.png; repl"),
])
def test_bad_folders(folder, change, code, words):
    change(folder)
    stops(words, load, folder, code=code)
    assert not times(folder.parent)


@pytest.mark.parametrize("method, scale", [("fdse", "paper"), ("fdse", "smoke"), ("fedgala", "laptop")])
def test_a_folder_has_the_settings_of_pacs(method, scale):
    own = parsed(method, "--dataset", "folder:/somewhere/images", "--scale", scale)
    pacs = parsed(method, "--dataset", "pacs", "--scale", scale)
    assert dataclasses.replace(own, dataset="pacs", target_part=pacs.target_part) == pacs
    assert own.origins | {"target_part": pacs.origins["target_part"]} == pacs.origins
    assert (own.target_part, own.origins["target_part"]) == ("all", "own data")


def test_a_path_is_the_same_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    absolute = f"folder:{tmp_path / 'images'}"
    for path in ("images", "./images/", "~/images", tmp_path / "x" / ".." / "images"):
        assert parsed("fedavg", "--dataset", f"folder:{path}").dataset == absolute


@pytest.mark.parametrize("path, name", [
    ("/a/my images (2)", "my_images_2_"), ("/a/b.c-d", "b.c-d"), ("/", "folder"),
    ("/a/" + "x" * 300, "x" * 40), ("/a/Bilder für", "Bilder_f_r"),
])
def test_names_of_files_have_no_path(path, name):
    assert named(f"folder:{path}").short == name
    assert named("pacs").short == "pacs"


@pytest.fixture
def flags(folder, monkeypatch) -> list:
    monkeypatch.chdir(folder.parent)
    return ["--scale", "smoke", "--precision", "fp32", "--dataset", "folder:images", *FLAGS]


def test_a_run_is_found_again_until_an_image_changes(flags, folder, capsys):
    args = parsed("fedavg", *flags)
    first, = run_all("fedavg", args)
    there = folder_of(args, first["args"])
    assert re.fullmatch(r"runs/fedavg-images-indomain-smoke-s0-[0-9a-f]{8}", str(there))
    assert first["args"]["dataset"].startswith("folder:images ")
    assert run_all("fedavg", args) == [first] and "holds this run, finished" in capsys.readouterr().out
    Image.new("RGB", (8, 8), "red").rotate(30).save(folder / "north" / "ill" / "new.png")
    fails(capsys, 2, "holds a run of other arguments .dataset folder:", run_all, "fedavg",
          parsed("fedavg", *flags, "--out", there))
    run_all("fedavg", args)
    assert len(list(Path("runs").iterdir())) == 2


def test_a_domain_of_any_name_is_trained_and_drawn(flags, folder):
    name = "$5_$10%{b}"
    (folder / "south").rename(folder / name)
    flags = [*flags, "--rounds", "1", "--out", "x", "--figures"]
    result, = run_all("fedavg", parsed("fedavg", *flags))
    assert list(result["best"]["clients"]) == sorted([name, "north"])
    assert Path("x/curves.png").exists()


def test_a_domain_that_is_named_as_a_client(flags, folder, capsys):
    """Its accuracy would take the place of the other's."""
    (folder / "south").rename(folder / "north-0")
    args = parsed("fedavg", *flags, "--clients-per-domain", "2", "--protocol", "lodo", "--target", "north-0")
    fails(capsys, 2, "two of north-0, north-1, north-0 have one name", run_all, "fedavg", args)


@pytest.mark.slow
def test_the_readmes_example(tmp_path, monkeypatch, capsys):
    """Each command as it is printed but for its length, on a folder as it is described."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "my_images", ("hospital_a", "hospital_b", "hospital_c"), count=10)
    section = (ROOT / "README.md").read_text().split("## Your own images")[1].split("\n## ")[0]
    *trainings, (_, name, *predicting) = programs(section.split("```")[1])
    for _, *flags in trainings:
        result, = run_all("fdse", parsed("fdse", *flags, "--rounds", 2, "--epochs", 1, "--image-size", 64))
        assert result["best"]["ALL"] > 0
    capsys.readouterr()
    assert name == "reproduce.predict"
    predict.main(predicting)
    assert len(capsys.readouterr().out.splitlines()) == 21


def test_a_photo_is_turned_as_its_exif_data_say(tmp_path):
    """A camera that was held upright stores the picture on its side."""
    photo, exif = Image.new("L", (16, 8)), Image.Exif()
    photo.paste(250, (8, 0, 16, 8))
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    photo.save(tmp_path / "x.png", exif=exif)
    turned = to_rgb((tmp_path / "x.png").read_bytes(), 8)
    assert turned[:3].max() < 40 and turned[-3:].min() > 200


def test_scans_of_12_and_14_bits_are_named(folder, capsys):
    for i, highest in enumerate((4095, 16383, 16384)):
        pixels = np.full((8, 8), highest, np.uint16)
        pixels[i] = 0
        Image.fromarray(pixels).save(folder / "north" / "ill" / f"{i}.png")
    for _ in range(2):  # also where the cache is there
        load(folder)
        said = capsys.readouterr().err
        assert "images of 16 bits a pixel use 14 or fewer" in said
        assert said.splitlines()[-1].endswith("or to all 16; 2 in all: north/ill/0.png, north/ill/1.png")


def odd_pixels(folder: Path) -> None:
    """An image of one colour, and a file of two pages."""
    Image.new("RGB", (20, 24), "gray").save(folder / "north" / "ill" / "0.png")
    first, second = (Image.open(folder / "south" / "ill" / f"{i}.png") for i in (9, 1))
    first.save(folder / "south" / "ill" / "9.tif", save_all=True, append_images=[second])
    (folder / "south" / "ill" / "9.png").unlink()


def inverted(folder: Path) -> None:
    for file in folder.rglob("*.png"):
        dark = Image.eval(Image.open(file), lambda value: value // 4)
        (ImageOps.invert(dark) if "north" in file.parts else dark).save(file)


def pale(folder: Path) -> None:
    for file in (folder / "south").rglob("*.png"):
        Image.eval(Image.open(file), lambda value: 120 + value // 16).save(file)


@pytest.mark.parametrize("change, words", [
    (odd_pixels, ["have one colour everywhere; 1 in all: north/ill/0.png",
                  "of which the first is taken; 1 in all: south/ill/9.tif"]),
    (inverted, ["they may be inverted, .*; 1 in all: north .mean 22[0-9] and deviation"]),
    (pale, ["have much less contrast.*; 1 in all: south .mean 12[0-9] and deviation [0-9] of 255, usual"]),
    (lambda _: None, []),
])
def test_odd_pixels_and_odd_hospitals_are_named(tmp_path, capsys, change, words):
    folder = write_images(tmp_path / "images", ("north", "south", "west"))
    change(folder)
    load(folder)
    lines = [line for line in capsys.readouterr().err.splitlines() if "in all: " in line]
    assert len(lines) == len(words)
    for expected in words:
        assert any(re.search(expected, line) for line in lines), lines


def test_what_is_transparent_is_white_in_the_decoded_images(folder):
    """Black in its hidden colours; images of a known data set keep these."""
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(folder / "north/ill/0.png")
    domains, _ = load(folder)
    assert (domains[0].images == 255).flatten(1).all(1).sum() == 1


def test_two_spellings_of_an_umlaut_are_one_class_and_rare_endings_are_images(folder):
    """As macOS writes it and as others do; also in split.csv."""
    for domain, form in (("north", "NFC"), ("south", "NFD")):
        place = folder / domain / unicodedata.normalize(form, "gesund, für")
        (folder / domain / "healthy").rename(place)
        for i, ending in enumerate(("jfif", "jpe")):
            (place / f"{i}.png").rename(place / f"{i}.{ending}")
    table = unicodedata.normalize("NFC", 'file,part\n"south/gesund, für/0.jfif",train\n')
    (folder / "split.csv").write_text(table, encoding="utf-8")
    domains, classes = load(folder)
    assert classes == ("gesund, für", "ill") and [len(d.labels) for d in domains] == [20, 20]
    assert domains[1].given[0, 0] == 0 and (domains[1].given[1:, 0] == -1).all()


def test_a_domain_of_decomposed_letters_is_left_out(folder):
    """Whichever way its folder and the flag are spelled."""
    name = unicodedata.normalize("NFD", "Zürich")
    (folder / "south").rename(folder / name)
    for form in ("NFC", "NFD"):
        target = unicodedata.normalize(form, name)
        args = parsed("fedavg", "--dataset", f"folder:{folder}", "--protocol", "lodo", "--target", target)
        for names in (known_domains(args.dataset), common.open_dataset(args).names):
            assert targets_of(args, names) == [unicodedata.normalize("NFC", name)]


def test_broken_images_are_left_out_on_demand(flags, folder, capsys):
    not_readable(folder)
    plain = parsed("fedavg", *flags)
    fails(capsys, 1, "images that cannot be decoded: 2 .*--skip-broken", run_all, "fedavg", plain)
    args = parsed("fedavg", *flags, "--skip-broken")
    assert run_all("fedavg", args)[0]["args"]["skip_broken"]
    said = capsys.readouterr().err
    assert "images that cannot be decoded were left out, as --skip-broken asks; 2 in all: north/ill/4" in said
    (folder / "split.csv").write_text("file,part\nnorth/ill/4.png,train\n")  # of all images that are there
    assert [len(d.labels) for d in common.open_dataset(args).domains] == [19, 19]
    capsys.readouterr()
    fails(capsys, 1, "images that cannot be decoded: 2 .*--skip-broken", run_all, "fedavg", plain)


def test_a_broken_image_of_ones_own_is_in_no_archive(folder):
    not_readable(folder)
    stops("cannot be decoded: 2 .*; replace or remove them, or go on without them: --skip", load, folder)


def test_more_domains_than_open_files(tmp_path):
    """A file for each would be too many."""
    folder = write_images(tmp_path / "images", map(str, range(90)), "ab", count=1)
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 60, most))
    try:
        assert len(load(folder, 8)[0]) == 90
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
