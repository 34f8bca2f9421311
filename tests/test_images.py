"""From an archive or a folder of images to domains: good, damaged and foreign ones, caches and downloads."""

import http.server
import os
import threading
import zipfile

import common
from plumbing.archives import download
from plumbing.decoding import to_rgb
from tests.conftest import fails, parsed, run_here, zipped

import numpy as np
import pytest
import torch
from PIL import Image

OFFICE = ("--dataset", "officecaltech", "--image-size", "64")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_all_image_modes_become_rgb(tmp_path, mode):
    """A picture whose left half is dark and whose right half is bright stays so, in every mode."""
    if mode == "I;16":
        image = Image.fromarray(np.repeat([[1000] * 10 + [60000] * 10], 20, 0).astype(np.uint16))
        assert image.mode == mode
    else:
        image = Image.fromarray(np.repeat([[4] * 10 + [234] * 10], 20, 0).astype(np.uint8)).convert("RGB").convert(mode)
    path = tmp_path / f"x.{'jpg' if mode == 'CMYK' else 'png'}"
    image.save(path)
    pixels = to_rgb(path.read_bytes(), 8)
    assert pixels.shape == (8, 8, 3) and pixels.dtype == np.uint8
    assert pixels[:, :2].max() < 30 and pixels[:, -2:].min() > 200


def test_float_pixels_are_refused(tmp_path):
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match="no defined range"):
        to_rgb((tmp_path / "x.tif").read_bytes(), 4)


def office_args(tmp_path, *flags):
    return parsed("fedavg", *OFFICE, "--data", tmp_path / "data", "--archives", tmp_path / "archives", *flags)


def test_zip_and_folder_give_the_same_images_and_the_cache_serves_later_runs(tmp_path, office, capsys):
    (office / "dslr" / "mug" / "notes.txt").write_text("no image")
    zipped(office, tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip")
    domains, classes = common.load_domains(office_args(tmp_path))
    assert "1 files are no images and were left out: " in capsys.readouterr().err
    assert {d.name: len(d.labels) for d in domains} == dict.fromkeys(["amazon", "caltech", "dslr", "webcam"], 20)
    assert domains[0].images.shape == (20, 3, 64, 64) and len(classes) == 10
    bright = [domains[2].images[i].float().mean((0, 2)).argmax() // 6.4 for i in range(20)]  # the row of the class
    assert [int(b) for b in bright] == domains[2].labels.tolist()
    cached = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*.npy")}
    again, _ = common.load_domains(office_args(tmp_path))
    assert all(torch.equal(a.images, b.images) for a, b in zip(domains, again))
    assert cached == {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*.npy")}
    other = tmp_path / "other" / "officecaltech"
    other.parent.mkdir()
    office.rename(other)
    unpacked, _ = common.load_domains(parsed("fedavg", *OFFICE, "--data", tmp_path / "other"))
    assert all(torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in zip(domains, unpacked))


def test_bad_archives(tmp_path, office, capsys):
    archive = zipped(office, tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip")
    whole = archive.read_bytes()
    run = lambda: run_here("fedavg", tmp_path / "run", *OFFICE, "--data", tmp_path / "data", "--archives",
                           tmp_path / "archives")
    archive.write_bytes(whole[:len(whole) // 2])
    fails(capsys, 1, "no whole zip archive.*get it again", run)
    archive.write_bytes(whole)
    with zipfile.ZipFile(archive, "a") as z:
        z.writestr("Office_Caltech_DA_Dataset-main/../../evil.png", b"x")
    fails(capsys, 1, "leads outside the folder", run)
    damaged = bytearray(whole)
    at = whole.index(b"IDAT", len(whole) // 4)
    damaged[at + 8:at + 30] = bytes(22)
    archive.write_bytes(damaged)
    fails(capsys, 1, "cannot be decoded", run)
    zipped(office / "amazon", archive)
    fails(capsys, 1, "found no folder amazon; expected the folders amazon, Caltech", run)
    assert not list((tmp_path / "data").rglob("*.npy")) and not list((tmp_path / "data").rglob("*.tmp"))


def test_bad_folders(tmp_path, office, capsys):
    (tmp_path / "data").mkdir()
    folder = office.rename(tmp_path / "data" / "officecaltech")
    run = lambda: run_here("fedavg", tmp_path / "run", *OFFICE, "--data", tmp_path / "data")
    (folder / "dslr" / "mug" / "0.png").write_bytes(b"not an image")
    fails(capsys, 1, "dslr/mug/0.png cannot be decoded", run)
    (folder / "dslr" / "mug" / "0.png").unlink()
    fails(capsys, 1, "domain dslr has 19 images; expected 20", run)
    (folder / "dslr" / "mug").rename(folder / "dslr" / "cup")
    fails(capsys, 1, "domain dslr has no images in dslr/mug; expected.*found backpack.*cup", run)


def test_a_damaged_cache_is_named(tmp_path, office, capsys):
    zipped(office, tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip")
    common.load_domains(office_args(tmp_path))
    pixels, index = (next((tmp_path / "data").rglob(n)) for n in ("dslr.npy", "index.json"))
    whole = pixels.read_bytes(), index.read_text()
    np.save(tmp_path / "float.npy", np.zeros((20, 64, 64, 3)))
    for damaged in ((b"x", whole[1]), (b"", whole[1]), ((tmp_path / "float.npy").read_bytes(), whole[1]), (whole[0], "null"),
                    (whole[0], whole[1].replace('"dslr": ', '"other": ')), (whole[0], "{")):
        pixels.write_bytes(damaged[0]), index.write_text(damaged[1])
        with pytest.raises(common.Stop, match="cache .* is damaged.*delete that folder"):
            common.load_domains(office_args(tmp_path))
    index.unlink()  # as a whole cache never is: made again
    assert len(common.load_domains(office_args(tmp_path))[0]) == 4


def test_a_full_disk_while_decoding(tmp_path, office, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    zipped(office, tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip")
    monkeypatch.setattr(os, "posix_fallocate", full)
    fails(capsys, 1, "No space left on device", run_here, "fedavg", tmp_path / "run", *OFFICE, "--data", tmp_path / "data",
          "--archives", tmp_path / "archives")
    assert not list((tmp_path / "data" / "cache").glob("office*"))


def test_download_goes_on_where_it_stopped(tmp_path):
    content, asked = os.urandom(5_000_000), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers.get("Range"))
            begin = int(asked[-1][6:-1]) if asked[-1] else 0
            if begin >= len(content):
                return self.send_error(416)
            self.send_response(206 if asked[-1] else 200)
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            self.wfile.write(content[begin:begin + 3_000_000] if len(asked) == 1 else content[begin:])

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, path = f"http://127.0.0.1:{server.server_port}/x.zip", tmp_path / "downloads" / "x.zip"
        with pytest.raises(common.Stop, match="could not download.*--archives"):
            download(url, path)
        assert not path.exists()
        assert download(url, path).read_bytes() == content and asked[1] == "bytes=3000000-"
        path.rename(path.with_name("x.zip.part"))  # killed just before the last renaming
        assert download(url, path).read_bytes() == content and asked[2:] == ["bytes=5000000-", None]
        server.shutdown()
    with pytest.raises(common.Stop, match="could not download"):
        download(url, tmp_path / "y.zip")
