"""What a trained network says of images, python -m reproduce.predict: prepared as the run's were, to the
bit; nothing is skipped in silence."""

import csv
import dataclasses
import os
import shutil
import threading
from pathlib import Path

import common
from baselines.local import Ensemble
from plumbing.run.errors import printable
from reproduce import predict
from reproduce.loading import load_run
from tests.conftest import run_here, stops, write_files
from tests.own_images import FLAGS, write_images

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A folder with `images` and a `run` on them; normalized, so that each step of the preparation counts."""
    place = tmp_path_factory.mktemp("own")
    write_images(place / "images")
    flags = [*FLAGS, "--normalize", "imagenet", "--data", place / "data", "--rounds", "1"]
    run_here("fedavg", place / "run", "--dataset", f"folder:{place / 'images'}", *flags)
    return place


def predicted(capsys, *words) -> tuple[list[list[str]], str]:
    """The rows of the table that is printed, and stderr."""
    predict.main([str(word) for word in words])
    said = capsys.readouterr()
    return [line.split(maxsplit=2) for line in said.out.splitlines()[1:]], said.err


def expected(net: torch.nn.Module, data: common.Data) -> torch.Tensor:
    """The probabilities of all images of `data`, as the run's evaluation has them."""
    with torch.no_grad(), common.autocast(net.run.args):
        return torch.cat([net(x).float().softmax(1) for x, _ in common.in_order(data, net.run.args)])


def test_images_are_prepared_as_the_runs_to_the_bit(own):
    net = load_run(own / "run", "south")
    args = dataclasses.replace(net.run.args, data=str(own / "data"), limit=0)  # all, in their order
    d = common.open_dataset(args).domains[1]
    whole = common.Data(d.images, torch.arange(20), d.labels, "cpu", "imagenet")
    rows, problems = predict.predict(net, predict.files_of([str(own / "images" / "south")]))
    p, labels = expected(net, whole).max(1)
    assert problems == [] and [net.run.classes.index(c) for _, c, *_ in rows] == labels.tolist()
    assert [max(row.p) for row in rows] == p.tolist()


def test_embedded_digits_and_gray_images(tmp_path):
    """Of 8x8 pixels, as scikit-learn has them, and of the run's 28x28, in one channel or in three."""
    run_here("fedavg", tmp_path / "run", "--rounds", "1", "--image-size", "28")
    net = load_run(tmp_path / "run", "d0")
    small = torch.from_numpy(load_digits().images[:6] * (255 / 16)).round().to(torch.uint8)
    large = common.rotate(small[:, None], 0, 28)
    whole = common.Data(large, torch.arange(6), torch.zeros(6, dtype=torch.long), "cpu", "unit")
    p = expected(net, whole).max(1).values.tolist()
    for images, mode in ((small, "L"), (small, "RGB"), (large[:, 0], "L")):
        for i, image in enumerate(images.numpy()):
            Image.fromarray(image).convert(mode).save(tmp_path / f"{i}.png")
        rows, _ = predict.predict(net, [tmp_path / f"{i}.png" for i in range(6)])
        assert [max(row.p) for row in rows] == p
    wide = Image.fromarray(np.zeros((9, 28), np.uint8))
    assert predict.prepared(wide, net.run).shape == (1, 28, 28)


def test_labelled_folders_give_accuracy_and_confusion(own, tmp_path, capsys):
    """As the table has the classes, of the images that were not trained on, also of copies elsewhere; a
    single image elsewhere, and nothing is known of the true classes."""
    south = own / "images" / "south"
    part_of = {row["file"]: row["part"] for row in csv.DictReader((own / "run" / "parts.csv").open())}
    copy = shutil.copytree(south, tmp_path / "copy")
    for place in (south, copy):
        rows, said = predicted(capsys, own / "run", place)
        pairs = []
        for c, _, file in rows:
            if part_of["/".join(["south", *Path(file).parts[-2:]])] != "train":
                pairs.append((Path(file).parent.name, c))
        right = sum(c == of_folder for of_folder, c in pairs)
        assert "16 of the 20 images were trained on, and are not counted. 2 are validation images" in said
        assert f"{100 * right / 4:.2f}% of 4 images right" in said
        matrix = [line.split() for line in said.splitlines() if line.startswith(("healthy", "ill"))]
        assert [[int(count) for count in counts] for _, *counts in matrix] == confusion_matrix(
            *zip(*pairs)).tolist()
    (own / "run" / "parts.csv").rename(tmp_path / "parts.csv")  # of a run from before
    assert "does not say which images it was trained on" in predicted(capsys, own / "run", south)[1]
    (tmp_path / "parts.csv").rename(own / "run" / "parts.csv")
    shutil.copy(south / "ill" / "0.png", tmp_path / "a.png")
    _, said = predicted(capsys, own / "run", south, tmp_path / "a.png")
    assert "right" not in said


def test_a_folder_above_is_no_label(own, tmp_path, capsys):
    """/home/ill/scans is nobody's diagnosis; a folder of a class that is named itself is one."""
    place = tmp_path / "ill" / "scans"
    shutil.copytree(own / "images" / "south" / "ill", place)
    assert "right" not in predicted(capsys, own / "run", place)[1]
    assert "trained on" not in predicted(capsys, own / "run", place / "0.png")[1]
    place = place.rename(tmp_path / "healthy")
    assert "by the names of their folders" in predicted(capsys, own / "run", place, "--client", 1)[1]


def test_each_of_many_images_is_predicted(own):
    """In batches of a hundred: the last of them are others than the first."""
    files = predict.files_of([str(own / "images")])
    net = load_run(own / "run")
    many = [*files, *files[:20], *reversed(files), *files[:5]]
    rows, _ = predict.predict(net, many)
    p = {row.file: row.p for row in predict.predict(net, files)[0]}
    assert [row.file for row in rows] == many and len(many) > 100
    assert all(row.p == pytest.approx(p[row.file], abs=1e-5) for row in rows)


def test_scans_of_twelve_bits_are_named(own, tmp_path, capsys):
    """As before a training: they are nearly black. Those that use all 16 bits are not named."""
    for name, largest in (("scan", 4095), ("whole", 60000)):
        Image.fromarray(np.full((20, 20), largest, np.uint16)).save(tmp_path / f"{name}.png")
    _, said = predicted(capsys, own / "run", tmp_path)
    assert "1 images of 16 bits a pixel use 14 or fewer" in said and "such as" in said and "scan.png" in said


def test_the_table_and_the_csv_have_the_same(own, tmp_path, capsys):
    photos = own / "images" / "north" / "ill"
    one = own / "images" / "south" / "ill" / "0.png"
    words = [own / "run", photos, one, one, "--client", 1]
    rows, said = predicted(capsys, *words)
    assert [Path(file) for _, _, file in rows] == [*sorted(photos.iterdir()), one, one]
    assert "12 of 12 images, by the network of client south after round 1" in said
    out = tmp_path / "new" / "a.csv"
    for _ in range(2):  # its own table may be replaced
        assert predicted(capsys, *words, "--csv", out)[0] == []
    table = list(csv.DictReader(out.open()))
    assert [*table[0]] == ["file", "class", "probability", "p(healthy)", "p(ill)", "part"]
    for row, (c, p, file) in zip(table, rows, strict=True):
        assert (row["file"], row["class"], f"{float(row['probability']):.4f}") == (file, c, p)
        healthy, ill = float(row["p(healthy)"]), float(row["p(ill)"])
        assert float(row[f"p({c})"]) == max(healthy, ill) == float(row["probability"])
        assert healthy + ill == pytest.approx(1, abs=1e-6)


def test_files_that_cannot_be_read_are_named(own, tmp_path, capsys):
    """The others are predicted all the same; the exit code is 1."""
    good = (own / "images" / "north" / "ill" / "0.png").read_bytes()
    odd = "a\x1b[31m\n.png"  # whose line end and escape code are written out
    contents = {odd: good, "b.png": b"x", "c.jpg": b"", "d.png": good[:200], "f": good, ".hidden.png": b"x"}
    write_files(tmp_path, contents)
    os.mkfifo(tmp_path / "e.png")  # whose end nobody writes; who reads it would wait for it
    written = threading.Timer(30, lambda: os.close(os.open(tmp_path / "e.png", os.O_WRONLY)))
    written.start()
    with pytest.raises(SystemExit, match="1"):
        predict.main([str(own / "run"), str(tmp_path), str(tmp_path / "f")])
    written.cancel()
    said = capsys.readouterr()
    predicted_files = [line.split()[-1] for line in said.out.splitlines()[1:]]
    assert predicted_files == [str(tmp_path / name) for name in (printable(odd), "f")]
    named = [line.split()[1] for line in said.err.splitlines() if "cannot be read as an image (" in line]
    assert named == [str(tmp_path / name) for name in ("b.png", "c.jpg", "d.png", "e.png")]
    assert "b.png cannot be read as an image (UnidentifiedImageError)" in said.err
    assert "e.png cannot be read as an image (UserError)" in said.err
    assert "2 of 6 images" in said.err
    assert f"by their names were left out; 1 in all, such as {tmp_path / 'f'}" in said.err


def test_an_ensembles_outputs_are_probabilities_already(own):
    """A network's that are not finite say nothing."""
    net = load_run(own / "run")
    both = Ensemble(net, [common.state(net), common.state(net)]).eval()
    data = net.run.data(torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8))
    ours, theirs = (common.probabilities(of, data, net.run.args)[0] for of in (both, net))
    assert torch.allclose(ours, theirs)
    net.state_dict()["body.1.running_var"].fill_(-1)
    stops("numbers that are not finite", common.probabilities, net, data, net.run.args)
