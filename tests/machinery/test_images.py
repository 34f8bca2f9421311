"""Images of every mode and format, and downloads that break off."""

import http.server
import os
import threading

from plumbing.data.archives import download
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
