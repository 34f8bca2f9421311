"""Images of every mode and format, and downloads that break off."""

import http.server
import os
import struct
import threading
import zlib

from plumbing.data.archives import download
from plumbing.data.decoding import as_rgb, upright
from tests.conftest import stops, to_rgb

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
    pixels = to_rgb((tmp_path / file).read_bytes(), 8)
    assert pixels.shape == (8, 8, 3) and pixels.dtype == np.uint8
    assert pixels[:, :2].max() < 30 and pixels[:, -2:].min() > 200


def as_white_is_zero(tiff: bytes) -> bytes:
    """A TIFF file, whose tag 262 is made 0."""
    black_is_zero = struct.pack("<HHIH", 262, 3, 1, 1)
    assert tiff.count(black_is_zero) == 1
    return tiff.replace(black_is_zero, black_is_zero[:-2] + bytes(2))


@pytest.mark.parametrize("dtype, dark, bright", [(np.uint16, 1000, 60000), (np.uint8, 4, 234)])
def test_tiff_in_which_white_is_zero(tmp_path, dtype, dark, bright):
    """Of 16 bits as of 8; a known dataset would stay as the records have it."""
    half_dark(20, dark, bright, dtype).save(tmp_path / "x.tif")
    image, _ = upright(as_white_is_zero((tmp_path / "x.tif").read_bytes()), True)
    pixels = as_rgb(image, 8)
    assert pixels[:, :2].min() > 200 and pixels[:, -2:].max() < 30


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(tmp_path, mode):
    """Else the colour shows that it hides. Known datasets keep it, since their records have it."""
    image = half_dark(20, 4, 100, np.uint8).convert(mode.removesuffix("A"))
    if mode != "P":
        image.putalpha(half_dark(20, 0, 255, np.uint8))
    image.save(tmp_path / "x.png", **({"transparency": 4} if mode == "P" else {}))
    content = (tmp_path / "x.png").read_bytes()
    own, known = (as_rgb(upright(content, is_own)[0], 20) for is_own in (True, False))
    assert own[:, :9].min() > 250 and known[:, :9].max() < 30
    assert own[:, -9:].max() < 110 and known[:, -9:].max() < 110


def png_of_16_bits(values: np.ndarray) -> bytes:
    """RGB, or with alpha, with 16 bits a value, which PIL reads and does not write."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, 2 if channels == 3 else 6, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return content


@pytest.mark.parametrize("highest, kinds", [(4095, ["dark"]), (16383, ["dark"]), (16384, [])])
def test_colours_of_16_bits_that_use_few_are_dark(highest, kinds):
    values = np.zeros((4, 4, 3), np.uint16)
    values[1, 2, 0] = highest
    assert upright(png_of_16_bits(values))[1] == kinds
    transparent = np.concatenate([values, np.zeros((4, 4, 1), np.uint16)], 2)  # becomes white
    assert upright(png_of_16_bits(transparent), is_own=True)[1] == kinds


@pytest.mark.parametrize("comment", [b"#" + b"x" * (40 << 20), b"#\n" * (20 << 20)])
def test_a_header_that_does_not_end_is_refused_at_once(comment):
    """PIL reads it byte by byte: 40 MiB took minutes."""
    with pytest.raises(ValueError, match="its header does not end within 8192 bytes"):
        upright(b"P5\n" + comment + b"\n2 2\n255\n1234")
    image, _ = upright(b"P5\n# a scan\n2 2\n255\n1234")
    assert image.size == (2, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_32_bits_are_refused(tmp_path, dtype):
    """Of the values 0 to 255 the upper 8 of 16 bits would be black."""
    Image.fromarray(np.full((4, 4), 200, dtype)).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match="32 bits, and signed ones, have no defined range"):
        to_rgb((tmp_path / "x.tif").read_bytes(), 4)


def test_a_postscript_file_is_no_image(tmp_path, monkeypatch):
    """Whatever its name says: Ghostscript is not started."""
    Image.new("RGB", (8, 8)).save(tmp_path / "x.eps")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", pytest.fail)
    with pytest.raises(UnidentifiedImageError):
        to_rgb((tmp_path / "x.eps").read_bytes(), 8)


class OneFile(http.server.BaseHTTPRequestHandler):
    """Serves `content`, or what is asked of it; the first answer breaks off after 3,000,000 bytes."""

    content = os.urandom(5_000_000)
    asked: list[str | None]  # the Range of each request

    def do_GET(self):
        asked = self.headers.get("Range")
        self.asked.append(asked)
        begin = 0
        if asked:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        if begin >= len(self.content):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(self.content) - begin))
        self.end_headers()
        end = len(self.content)
        if len(self.asked) == 1:
            end = begin + 3_000_000
        self.wfile.write(self.content[begin:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def url(monkeypatch):
    """Where OneFile serves its content."""
    monkeypatch.setattr(OneFile, "asked", [], raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), OneFile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/x.zip"
        server.shutdown()


def test_download_goes_on_where_it_stopped(tmp_path, url):
    path = tmp_path / "downloads" / "x.zip"
    stops("could not download.*--archives", download, url, path)
    assert not path.exists()
    assert download(url, path).read_bytes() == OneFile.content
    assert OneFile.asked == [None, "bytes=3000000-"]


def test_a_download_killed_just_before_its_last_step(tmp_path, url):
    """All of it is there under the temporary name: the server has nothing to add."""
    OneFile.asked.append("an earlier request")
    (tmp_path / "x.zip.part").write_bytes(OneFile.content)
    assert download(url, tmp_path / "x.zip").read_bytes() == OneFile.content
    assert OneFile.asked[1:] == ["bytes=5000000-"]
