"""From an archive or a folder of images to domains: good, damaged and foreign ones, caches and downloads."""

import http.server
import os
import threading
from pathlib import Path

import common
from plumbing.archives import download
from plumbing.decoding import to_rgb
from tests.conftest import fails, parsed, run_here, zipped

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, UnidentifiedImageError

ARCHIVE = "Office_Caltech_DA_Dataset-main.zip"
SIZE = 64
OFFICE = ["--dataset", "officecaltech", "--image-size", str(SIZE)]

def half_dark(width: int, dark: int, bright: int, dtype: type) -> Image.Image:
    """A picture whose left half is dark and whose right half is bright."""
    row = [dark] * (width // 2) + [bright] * (width // 2)
    return Image.fromarray(np.repeat([row], width, 0).astype(dtype))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_all_image_modes_become_rgb(tmp_path, mode):
    """What is dark stays dark and what is bright stays bright, in every mode."""
    if mode == "I;16":
        image = half_dark(20, 1000, 60000, np.uint16)
    else:
        image = half_dark(20, 4, 234, np.uint8).convert("RGB").convert(mode)
    assert image.mode == mode
    path = tmp_path / "x.png"
    if mode == "CMYK":
        path = tmp_path / "x.jpg"
    image.save(path)
    pixels = to_rgb(path.read_bytes(), 8)
    assert pixels.shape == (8, 8, 3) and pixels.dtype == np.uint8
    assert pixels[:, :2].max() < 30 and pixels[:, -2:].min() > 200


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_32_bits_are_refused(tmp_path, dtype):
    """Of the values 0 to 255 the upper 8 of 16 bits would be black."""
    Image.fromarray(np.full((4, 4), 200, dtype)).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match="32 bits have no defined range"):
        to_rgb((tmp_path / "x.tif").read_bytes(), 4)


def test_a_pgm_of_16_bits_is_read(tmp_path):
    half_dark(20, 1000, 60000, np.uint16).save(tmp_path / "x.pgm")
    pixels = to_rgb((tmp_path / "x.pgm").read_bytes(), 8)
    assert pixels[:, :2].max() < 30 and pixels[:, -2:].min() > 200


def test_a_postscript_file_is_no_image(tmp_path, monkeypatch):
    """Whatever its name says: Ghostscript is not started."""
    Image.new("RGB", (8, 8)).save(tmp_path / "x.eps")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", pytest.fail)
    with pytest.raises(UnidentifiedImageError):
        to_rgb((tmp_path / "x.eps").read_bytes(), 8)

@pytest.fixture
def archive(tmp_path, office) -> Path:
    """The archive of the tiny Office-Caltech10."""
    return zipped(office, tmp_path / "archives" / ARCHIVE)


def loaded(tmp_path) -> list[common.Domain]:
    """What is in tmp_path's archives, or in its data."""
    folders = ["--data", tmp_path / "data", "--archives", tmp_path / "archives"]
    return common.open_dataset(parsed("fedavg", *OFFICE, *folders)).domains


def same(domains: list[common.Domain], others: list[common.Domain]) -> bool:
    """Whether both have the same images and labels."""
    for a, b in zip(domains, others, strict=True):
        if not (torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)):
            return False
    return True


def test_a_folder_gives_the_images_of_its_archive(tmp_path, office, archive):
    domains = loaded(tmp_path)
    (tmp_path / "other").mkdir()
    office.rename(tmp_path / "other" / "officecaltech")
    of_folder = common.open_dataset(parsed("fedavg", *OFFICE, "--data", tmp_path / "other")).domains
    assert same(domains, of_folder)


def run(tmp_path) -> None:
    """A run on what is in tmp_path."""
    folders = ["--data", tmp_path / "data", "--archives", tmp_path / "archives"]
    run_here("fedavg", tmp_path / "run", *OFFICE, *folders)


def damage_an_image(archive: Path, office: Path) -> None:
    damaged = bytearray(archive.read_bytes())
    pixels = damaged.index(b"IDAT", len(damaged) // 4) + 8
    damaged[pixels:pixels + 22] = bytes(22)
    archive.write_bytes(damaged)


def test_a_damaged_archive_ends_a_run_with_a_line(tmp_path, office, archive, capsys):
    damage_an_image(archive, office)
    fails(capsys, 1, "is no whole archive .Bad CRC-32", run, tmp_path)
    assert not list((tmp_path / "data").rglob("pixels.bin"))
    assert not list((tmp_path / "data").rglob("*.tmp"))

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
    with pytest.raises(common.UserError, match="could not download.*--archives"):
        download(url, path)
    assert not path.exists()
    assert download(url, path).read_bytes() == OneFile.content
    assert OneFile.asked == [None, "bytes=3000000-"]


def test_a_download_killed_just_before_its_last_step(tmp_path, url):
    """All of it is there under the temporary name: the server has nothing to add."""
    OneFile.asked.append("an earlier request")
    (tmp_path / "x.zip.part").write_bytes(OneFile.content)
    assert download(url, tmp_path / "x.zip").read_bytes() == OneFile.content
    assert OneFile.asked[1:] == ["bytes=5000000-"]
