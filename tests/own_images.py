"""A small folder of one's own images: two domains (and a third that lacks a class), two classes."""

from pathlib import Path

import numpy as np
from PIL import Image

FLAGS = ("--no-figures", "--backbone", "smallcnn_bn", "--image-size", "16", "--batch-size", "8",
         "--epochs", "1")


def write_images(folder: Path, domains=("north", "south"), classes=("healthy", "ill"),
                 count=10) -> Path:
    """folder/<domain>/<class>/<number>.png, of 20x24 pixels; the class is the half that is bright."""
    rng = np.random.default_rng(0)
    for domain in domains:
        for label, c in enumerate(classes):
            there = folder / domain / c
            there.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (20, 24, 3), dtype=np.uint8)
                pixels[10 * label:10 * label + 10] += 127
                Image.fromarray(pixels).save(there / f"{i}.png")
    return folder
