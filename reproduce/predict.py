"""What a trained network says of images: the class of each, and its probability.

    python -m reproduce.predict runs/fdse-... photos --client webcam
    python -m reproduce.predict runs/fdse-... a.jpg b.png --csv predictions.csv

The network is the one that the client is tested with (`load_run`), and the images are decoded, resized
and normalized as the run's were. Of a folder all images in it are taken, also those in folders inside it.
Every file that cannot be read is named, and the exit code is then 1. Where each image lies in a folder with
the name of a class, the accuracy and the confusion matrix follow, of the images that were not trained on.
"""

from __future__ import annotations

import argparse
import collections
import csv
import sys
from pathlib import Path
from typing import NamedTuple

import common
from plumbing.data.catalog import composed, named
from plumbing.data.decoding import TOLD, as_rgb, digest_of_pixels, upright
from plumbing.data.listings import is_image
from plumbing.run.errors import UserError, one_line_on_failure, printable, tell
from plumbing.run.files import check_regular, output_file, write_csv
from plumbing.run.settings import Parser
from reproduce.commands import about, add_run_flags
from reproduce.drawing import table_text
from reproduce.loading import Trained, load_run

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

class Row(NamedTuple):
    """What is said of an image."""

    file: Path
    c: str
    p: list[float]  # of all classes
    pixels: str  # their digest, by which the run's images are known


def predict(net: nn.Module, files: list[Path]) -> tuple[list[Row], list[str]]:
    """A row for each image, by a network of `load_run`; and a line for each file that cannot be read. Stop if
    the network has no classifier."""
    run = net.run
    if run.args.protocol == "linear":
        raise UserError("this run had no labels: its network gives representations and no classes; "
                        "load_run returns it, plumbing.run.linear.fit_linear fits a classifier to them", 2)
    if named(run.args.dataset).file:
        raise UserError(f"this run's data are those of {run.args.dataset}: give load_run(...) batches of "
                        "them, by net.run.inputs", 2)
    rows, problems, odd, is_own = [], [], {}, named(run.args.dataset).folder is not None
    size = max(run.args.batch_size, 100)
    for start in range(0, len(files), size):
        read, pixels, digests = [], [], []
        for file in files[start:start + size]:
            try:
                check_regular(file)
                image, kinds = upright(file.read_bytes(), is_own)
                pixels.append(prepared(image, run))
                read.append(file)
                digests.append(digest_of_pixels(pixels[-1].permute(1, 2, 0).numpy()))
                for kind in kinds:
                    odd.setdefault(kind, []).append(file)
            except Exception as e:  # whatever the system or the decoder makes of a file
                problems.append(f"{file} cannot be read as an image ({type(e).__name__})")
        if pixels:
            pixels = torch.stack(pixels).contiguous(memory_format=torch.channels_last)
            p, _ = common.probabilities(net, run.data(pixels), run.args)
            predicted = [run.classes[c] for c in p.argmax(1).tolist()]
            rows += map(Row, read, predicted, p.tolist(), digests)
    for kind, of_kind in odd.items():
        tell("predict", f"{len(of_kind)} {TOLD[kind]}, such as {printable(str(of_kind[0]))}")
    return rows, problems


def parts_of_run(folder: Path) -> dict[str, str]:
    """{digest of pixels: train, val or test} of the images of a run on images of one's own; those that are in
    several parts count as trained on. Empty of another run, or an older one."""
    part_of, file = {}, folder / "parts.csv"
    if file.is_file():
        with open(file, newline="", encoding="utf-8", errors="surrogateescape") as opened:
            for row in csv.DictReader(opened):
                if row.get("pixels") and part_of.get(row["pixels"]) != "train":
                    part_of[row["pixels"]] = row.get("part", "")
    return part_of


def true_classes(files: list[Path], given: list[Path], classes: tuple[str, ...]) -> list[str]:
    """The class of each image by the nearest folder that has a class's name, in the folder of `given` that it
    was found in or that folder itself; none unless all have one."""
    labels, spelled = [], {composed(c): c for c in classes}
    tops = [path.absolute() for path in given]
    for file in files:
        path = file.absolute()
        names = [path.parent.name]
        for top in tops:
            if path.is_relative_to(top) and path != top:
                names = [top.name, *path.relative_to(top).parts[:-1]]
        known = [spelled[composed(name)] for name in names if composed(name) in spelled]
        labels += known[-1:]
    return labels if len(labels) == len(files) else []


def judged(true: list[str], rows: list[Row], classes: tuple[str, ...], part_of: dict[str, str]) -> str:
    """The accuracy on images that were not trained on, and these by predicted class."""
    pairs_of = [(c, row.c) for c, row in zip(true, rows) if part_of.get(row.pixels) != "train"]
    said, trained = "", len(rows) - len(pairs_of)
    if trained:
        said = f"{trained} of the {len(rows)} images were trained on, and are not counted. "
    elif not part_of:
        said = "The run does not say which images it was trained on: these may be among them. "
    chosen_by = sum(part_of.get(row.pixels) == "val" for row in rows)
    if chosen_by:
        said += f"{chosen_by} are validation images, by which the round was chosen. "
    if not pairs_of:
        return f"{said}There are no others, so no accuracy."
    return said + accuracy_of(pairs_of, classes)


def accuracy_of(pairs_of: list[tuple[str, str]], classes: tuple[str, ...]) -> str:
    """The accuracy of pairs (true class, predicted class), and their matrix."""
    true = [c for c, _ in pairs_of]
    pairs = collections.Counter(pairs_of)
    rows = [[c, *(pairs[c, other] for other in classes)] for c in classes if c in true]
    right = sum(pairs[c, c] for c in classes)
    return (f"{100 * right / len(true):.2f}% of {len(true)} images right, by the names of their folders; "
            "images of each true class (rows) by predicted class:\n"
            f"{table_text(rows, ['', *classes], 'plain')}")


def prepared(image: Image.Image, run: Trained) -> Tensor:
    """The pixels of an image as the run's are, uint8 [C, S, S]."""
    size = run.args.image_size
    if run.channels == 3:
        return torch.from_numpy(as_rgb(image, size).copy()).permute(2, 0, 1)
    gray = torch.from_numpy(np.array(image.convert("L")))
    return common.rotate(gray[None, None], 0, size)[0]


def files_of(paths: list[str]) -> list[Path]:
    """The files, and of each folder the images below it by name; how many files are no images is said. Hidden
    files are not looked at."""
    files, left_out = [], []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; expected images, or folders with images", 2)
        if not path.is_dir():
            files.append(path)
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if not hidden and not file.is_dir():
                (files if is_image(file.name) else left_out).append(file)
    if left_out:
        tell("predict", "files that are no images by their names were left out; "
             f"{len(left_out)} in all, such as {left_out[0]}")
    if not files:
        raise UserError(f"there is no image in {', '.join(paths)}", 2)
    return files


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage, 1 if a file cannot be read."""
    flags = parsed(argv)
    with one_line_on_failure("predict", "the run is as it was"):
        if flags.csv:
            output_file(Path(flags.csv), lambda start: start.startswith(b"file,class,probability"))
        files = files_of(flags.images)
        net = load_run(flags.folder, flags.client, flags.which, device=flags.device, data=flags.data,
                       archives=flags.archives, any_code=flags.any_code, script=flags.script,
                       backbone=flags.backbone, state=flags.state)
        part_of = parts_of_run(Path(flags.folder))
        rows, problems = predict(net, files)
        run = net.run
        others = "" if flags.client else "; --client names another one"
        print(f"predict: {len(rows)} of {len(files)} images, by the network of client {run.client} after "
              f"round {run.round}{others}", file=sys.stderr)
        if flags.csv:
            lines = [["file", "class", "probability", *(f"p({c})" for c in run.classes), "part"]]
            for row in rows:
                lines.append([row.file, row.c, max(row.p), *row.p, part_of.get(row.pixels, "")])
            write_csv(Path(flags.csv), lines)
        else:
            lines = [[row.c, f"{max(row.p):.4f}", printable(str(row.file))] for row in rows]
            print(table_text(lines, ["class", "probability", "file"], "plain"))
        true = true_classes([row.file for row in rows], [Path(path) for path in flags.images], run.classes)
        if true:
            print(judged(true, rows, run.classes, part_of), file=sys.stderr)
        for problem in problems:
            tell("predict", problem)
        if problems:
            sys.exit(1)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="predict", allow_abbrev=False, description=about(__doc__))
    parser.add_argument("folder", help="output folder of a run, finished or not")
    parser.add_argument("images", nargs="+", help="image files, or folders with images")
    parser.add_argument("--client", help="client whose network predicts, by name or number; otherwise the "
                                         "network for the left-out domain, or the first client's if none is "
                                         "left out")
    parser.add_argument("--csv", default="", help="CSV file for the table, with the probability of every "
                                                  "class; otherwise the table is printed")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... or auto [cpu]")
    parser.add_argument("--script", default="", help="file of the run's method, if the method is your own")
    parser.add_argument("--backbone", default="", help="FILE.py:FUNCTION of the run's network, if the "
                                                       "network is your own")
    parser.add_argument("--state", default="", help="after a run on separate machines, the file in which the "
                                                    "client's node keeps its own part of the network")
    add_run_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
