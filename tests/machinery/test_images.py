"""Images of every mode and format."""

from plumbing.decoding import as_rgb, upright

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, UnidentifiedImageError

def half_dark(width: int, dark: int, bright: int, dtype: type) -> Image.Image:
    """A picture whose left half is dark and whose right half is bright."""
    row = [dark] * (width // 2) + [bright] * (width // 2)
    return Image.fromarray(np.repeat([row], width, 0).astype(dtype))


@pytest.mark.parametrize("mode, file", [
    ("1", "x.png"), ("L", "x.png"), ("LA", "x.png"), ("P", "x.png"), ("RGB", "x.png"), ("RGBA", "x.png"),
    ("CMYK", "x.jpg"), ("I;16", "x.png"), ("I;16", "x.pgm")])
def test_all_image_modes_become_rgb(tmp_path, mode, file):
    """What is dark stays dark and what is bright stays bright, in every mode."""
    if mode == "I;16":
        image = half_dark(20, 1000, 60000, np.uint16)
    else:
        image = half_dark(20, 4, 234, np.uint8).convert("RGB").convert(mode)
    image.save(tmp_path / file)
    pixels = as_rgb(upright((tmp_path / file).read_bytes())[0], 8)
    assert pixels.shape == (8, 8, 3) and pixels.dtype == np.uint8
    assert pixels[:, :2].max() < 30 and pixels[:, -2:].min() > 200


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_32_bits_are_refused(tmp_path, dtype):
    """Of the values 0 to 255 the upper 8 of 16 bits would be black."""
    Image.fromarray(np.full((4, 4), 200, dtype)).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match="32 bits, and signed ones, have no defined range"):
        as_rgb(upright((tmp_path / "x.tif").read_bytes())[0], 4)


def test_a_postscript_file_is_no_image(tmp_path, monkeypatch):
    """Whatever its name says: Ghostscript is not started."""
    Image.new("RGB", (8, 8)).save(tmp_path / "x.eps")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", pytest.fail)
    with pytest.raises(UnidentifiedImageError):
        as_rgb(upright((tmp_path / "x.eps").read_bytes())[0], 8)
