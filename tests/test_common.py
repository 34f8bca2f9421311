"""The common ground: command line, data, splits, backbones, round loop, resume, and every kind of bad input."""

import dataclasses
import gzip
import hashlib
import http.server
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import common
import domains
from tests.conftest import METHODS, ROOT, metrics, one_run, parsed, run_here, script, start, zipped

OFFICE = ("--dataset", "officecaltech", "--image-size", "64")
# Tests that start many processes are quick for the method with the most state; for the others they run with -m slow.
SEVERAL = [m if m == "fdse" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]


def fails(capsys, code: int, words: str, call, *args):
    """`call` ends the program with this exit code and one line on stderr that matches `words`."""
    with pytest.raises(SystemExit) as end:
        call(*args)
    error = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in error if line and "round/s" not in line and "image/s" not in line]
    assert end.value.code == code and len(lines) == 1 and re.search(words, lines[0]), lines


# Command line


def test_help_explains_every_flag(capsys):
    for method, (module, *_) in METHODS.items():
        with pytest.raises(SystemExit) as end:
            parsed(method, "--help")
        text = capsys.readouterr().out
        assert end.value.code == 0 and module.__doc__.splitlines()[0] in text
        for f in dataclasses.fields(module.Args):
            assert "--" + f.name.strip("_").replace("_", "-") in text
            assert len(f.metadata["text"]) > 10


def test_every_field_is_read_somewhere():
    for method, (module, *_) in METHODS.items():
        source = "".join((ROOT / name).read_text() for name in ("common.py", "domains.py", "learners.py", module.__file__))
        for f in dataclasses.fields(module.Args):
            assert re.search(rf"\b(args|a|cls)\.{f.name}\b", source) or f.name == "variant", f.name


def test_where_a_value_comes_from():
    assert parsed("fedavg").dataset == "digits"
    args = parsed("fedavg", "--dataset", "officecaltech10")
    assert (args.dataset, args.image_size, args.rounds, args.lr_decay) == ("officecaltech", 224, 500, 0.998)
    laptop = parsed("fedavg", "--dataset", "officecaltech", "--scale", "laptop")
    assert laptop.image_size < 224 and laptop.rounds < 500 and laptop.lr_decay == 0.998
    assert parsed("fedavg", "--dataset", "officecaltech", "--scale", "laptop", "--rounds", "7").rounds == 7
    assert parsed("fedavg", "--dataset=officecaltech10", "--data", "officecaltech10").data == "officecaltech10"


@pytest.mark.parametrize("method,flags,words", [
    ("fedavg", ["--dataset", "officehome2"], "officehome2.*officecaltech"),
    ("fedavg", ["--tau", "1"], "--tau is not a flag of fedavg"),
    ("fdse", ["--lamda", "1"], "did you mean --lambda"),
    ("fedavg", ["--rounds", "0"], "--rounds is 0.*at least 1"),
    ("fedavg", ["--rounds", "ten"], "--rounds.*ten"),
    ("fedavg", ["--lr", "nan"], "--lr is nan.*finite"),
    ("fedavg", ["--lr", "-1"], "--lr is -1.0.*above 0"),
    ("fedavg", ["--batch-size", "1"], "--batch-size is 1.*at least 2"),
    ("fedavg", ["--participation", "1.5"], "--participation is 1.5.*above 0 and at most 1"),
    ("fedavg", ["--split", "0.5/0.5"], "--split is 0.5/0.5.*three"),
    ("fedavg", ["--split", "0.9/0.1/0.1"], "sum to 1"),
    ("fedavg", ["--split", "nan/0.5/0.5"], "--split is nan"),
    ("fedavg", ["--device", "meta"], "--device is meta; expected"),
    ("fedavg", ["--device", "cuda:99"], "--device cuda:99 cannot be used"),
    ("fedavg", ["--device", "cpu", "--precision", "tf32"], "tf32 needs a GPU"),
    ("fdse", ["--tau", "0"], "--tau is 0.0.*at least 0.0001"),
    ("fedavg", ["--augment", "cutout"], "--augment.*cutout.*fedsr.*jigen"),
    ("fedavg", ["--variant", "fedcir"], "--variant fedcir has no settings for digits; it has for officecaltech"),
    ("fedsr", ["--variant", "fedprox"], "--variant.*fedprox.*fedl2r"),
    ("fedsr", ["--alpha-l2r", "-1"], "--alpha-l2r is -1.0.*at least 0"),
    ("fedsr", ["--dataset", "vlcs"], "vlcs.*officehome"),
    ("fedadg", ["--g-loss", "wgan"], "--g-loss.*wgan.*opposite"),
    ("fedadg", ["--smoothing", "2"], "--smoothing is 2.0.*at most 1"),
    ("fedadg", ["--projection-size", "0"], "--projection-size is 0.*at least 1"),
    ("fedcir", ["--generator-lr", "0"], "--generator-lr is 0.0.*above 0"),
    ("fedcir", ["--mle-samples", "1"], "--mle-samples is 1.*at least 2"),
    ("fedcir", ["--lambda-align", "inf"], "--lambda-align is inf.*finite"),
])
def test_bad_flags(capsys, method, flags, words):
    fails(capsys, 2, words, parsed, method, *flags)


@pytest.mark.parametrize("flags,code,words", [
    (["--protocol", "lodo", "--target", "d7"], 2, "--target d7.*d0, d15, d30"),
    (["--target", "d15"], 2, "goes with --protocol lodo"),
    (["--archives", "/no/such/folder"], 2, "--archives /no/such/folder is not a folder"),
    (["--backbone", "resnet18"], 2, "resnet18 takes colour images.*one channel"),
    (["--backbone", "smallcnn", "--weights", "imagenet"], 2, "no ImageNet weights for --backbone smallcnn"),
    (["--backbone", "smallcnn", "--image-size", "8"], 2, "smallcnn needs images of at least 10x10, not 8x8"),
    (["--weights", "/no/such/file.pt"], 2, "/no/such/file.pt: no such file of weights"),
    (["--limit", "5"], 1, "5 images, fewer than the 10 classes.*--limit"),
    (["--clients-per-domain", "30"], 1, "needs at least 2/1/1"),
    (["--dirichlet", "1"], 2, "--dirichlet 1.0 needs several clients"),
    (["--protocol", "lodo", "--target", "d0", "--target-part", "test", "--limit", "15"], 1, "d0 has 1 images to test; it needs 2"),
])
def test_bad_settings(capsys, tmp_path, flags, code, words):
    fails(capsys, code, words, run_here, "fedavg", tmp_path / "run", *flags)


# Data


def test_digits_are_dealt_out_once():
    dealt = domains.load_digits(28)
    assert [d.name for d in dealt] == ["d0", "d15", "d30", "d45", "d60", "d75"]
    assert sum(len(d.labels) for d in dealt) == 1797 and dealt[0].images.shape[1:] == (1, 28, 28)
    assert all(len(d.labels.unique()) == 10 for d in dealt)
    upright = [d.images.float().mean() for d in dealt]
    assert max(upright) - min(upright) < 8  # turned, not lost


def test_rotation_is_counter_clockwise_and_not_of_labels():
    image = torch.zeros(1, 1, 29, 29, dtype=torch.uint8)
    image[0, 0, 14, 20:] = 255  # a ray to the right
    turned = domains.rotate(image, 90, 29)[0, 0]
    assert turned[:9, 14].min() == 255 and turned[20:, 14].max() == 0  # now to the top


def fake_mnist(folder, monkeypatch, count=10000):
    rng, md5s = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for part, magic, body in (("images-idx3", 2051, rng.integers(0, 255, (count, 784), dtype=np.uint8)),
                              ("labels-idx1", 2049, (np.arange(count) % 10).astype(np.uint8))):
        head = b"".join(int(v).to_bytes(4, "big") for v in ((magic, count, 28, 28) if magic == 2051 else (magic, count)))
        path = folder / f"t10k-{part}-ubyte.gz"
        path.write_bytes(gzip.compress(head + body.tobytes(), 1))
        md5s.append((path.name, hashlib.md5(path.read_bytes()).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", md5s)


def test_rotatedmnist(tmp_path, monkeypatch, capsys):
    fake_mnist(tmp_path / "archives" / "MNIST" / "raw", monkeypatch)
    args = parsed("fedavg", "--dataset", "rotatedmnist-t10k", "--archives", tmp_path / "archives")
    domains, classes = common.load_domains(args)
    assert [d.name for d in domains] == ["m0", "m15", "m30", "m45", "m60", "m75"]
    assert all(d.labels.bincount().tolist() == [100] * 10 for d in domains)
    assert not torch.equal(domains[0].images, domains[1].images)
    (tmp_path / "archives" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"broken")
    with pytest.raises(common.Stop, match="expected md5"):
        common.load_domains(args)


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
    pixels = domains.to_rgb(path.read_bytes(), 8)
    assert pixels.shape == (8, 8, 3) and pixels.dtype == np.uint8
    assert pixels[:, :2].max() < 30 and pixels[:, -2:].min() > 200


def test_float_pixels_are_refused(tmp_path):
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match="no defined range"):
        domains.to_rgb((tmp_path / "x.tif").read_bytes(), 4)


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
            domains.download(url, path)
        assert not path.exists()
        assert domains.download(url, path).read_bytes() == content and asked[1] == "bytes=3000000-"
        path.rename(path.with_name("x.zip.part"))  # killed just before the last renaming
        assert domains.download(url, path).read_bytes() == content and asked[2:] == ["bytes=5000000-", None]
        server.shutdown()
    with pytest.raises(common.Stop, match="could not download"):
        domains.download(url, tmp_path / "y.zip")


# Splits, clients, batches


def test_every_image_is_in_one_part_of_one_client():
    for flags in ((), ("--clients-per-domain", "3"), ("--clients-per-domain", "3", "--dirichlet", "2"),
                  ("--protocol", "lodo", "--target", "d30"), ("--protocol", "lodo", "--target", "d30", "--target-part", "test")):
        args = parsed("fedavg", *flags)
        domains, classes = common.load_domains(args)
        clients, targets = common.make_clients(args, domains, 10)
        assert len(clients) == (6 - len(targets)) * args.clients_per_domain and len(targets) == ("lodo" in flags)
        for d in domains:
            held = [c for c in clients + targets if c.name.split("-")[0] == d.name]
            rows = torch.cat([p.index for c in held for p in (c.train, c.val, c.test)])
            assert sorted(rows.tolist()) == list(range(len(d.labels)))
            assert all(torch.equal(p.labels, d.labels[p.index]) for c in held for p in (c.train, c.val, c.test))
    again, _ = common.make_clients(args, domains, 10)
    assert all(torch.equal(a.train.index, b.train.index) for a, b in zip(clients, again))
    other, _ = common.make_clients(dataclasses.replace(args, seed=1), domains, 10)
    assert not torch.equal(clients[0].train.index, other[0].train.index)


def test_twins_of_rotatedmnist_are_in_the_same_part(tmp_path, monkeypatch):
    """The six rotations of an image are never trained on in one domain and tested in another."""
    fake_mnist(tmp_path, monkeypatch)
    for flags in ((), ("--limit", "200"), ("--clients-per-domain", "2", "--dirichlet", "1")):
        args = parsed("fedavg", "--dataset", "rotatedmnist-t10k", "--archives", tmp_path, "--protocol", "indomain", *flags)
        data, _ = common.load_domains(args)
        clients, _ = common.make_clients(args, data, 10)
        upright = data[0].images[:, 0, 10:18, 10:18].reshape(len(data[0].labels), -1)  # what row i shows in m0
        for d in data[1:]:
            assert torch.equal(d.labels, data[0].labels)
        tested = set(torch.cat([c.test.index for c in clients]).tolist())
        assert tested.isdisjoint(torch.cat([c.train.index for c in clients]).tolist())
        assert len(upright.unique(dim=0)) > 0.9 * len(upright)
        for d in data[1:]:  # and row i shows the same image in every domain: its bright pixels stay as many
            assert (d.images.float().mean((1, 2, 3)) - data[0].images.float().mean((1, 2, 3))).abs().max() < 25


def test_split_sizes_of_office():
    """The 10% test parts of the domains have 95, 112, 15 and 29 images (FDSE Table 2 is in fractions of these)."""
    sizes = [[len(p) for p in common.cut(torch.arange(n), "0.8/0.1/0.1")] for n in (958, 1123, 157, 295)]
    assert [s[2] for s in sizes] == [95, 112, 15, 29] and sizes[2] == [126, 16, 15]


def test_dirichlet_skews_the_labels():
    args = parsed("fedavg", "--clients-per-domain", "2", "--dirichlet", "0.3", "--split", "0.6/0.2/0.2")
    domains, _ = common.load_domains(args)
    clients, _ = common.make_clients(args, domains, 10)
    share = [c.train.labels.bincount(minlength=10).float() / len(c.train) for c in clients[:2]]
    assert (share[0] - share[1]).abs().sum() > 0.5


def part(n):
    return common.Data(torch.zeros(n, 1, 2, 2, dtype=torch.uint8), torch.arange(n), torch.arange(n), "cpu", "unit")


def test_batches():
    args = parsed("fedavg", "--batch-size", "4", "--epochs", "2")
    seen = [y.tolist() for _, y in common.batches(part(10), args, 0, 0)]
    assert [len(y) for y in seen] == [4, 4, 2] * 2
    assert sorted(sum(seen[:3], [])) == sorted(sum(seen[3:], [])) == list(range(10)) and seen[:3] != seen[3:]
    assert seen == [y.tolist() for _, y in common.batches(part(10), args, 0, 0)]
    assert seen != [y.tolist() for _, y in common.batches(part(10), args, 1, 0)]
    assert seen != [y.tolist() for _, y in common.batches(part(10), args, 0, 1)]
    steps = dataclasses.replace(args, steps=7)
    assert [len(y) for _, y in common.batches(part(10), steps, 0, 0)] == [4, 4, 2, 4, 4, 2, 4]


def test_augmentation_is_for_training_alone_and_comes_before_normalization():
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8)
    data = common.Data(images, torch.arange(40), torch.zeros(40).long(), "cpu", "imagenet")
    args = parsed("fedavg", "--augment", "simclr", "--batch-size", "40")
    common.seed_all(1)
    (x, _), = common.batches(data, args, 0, 0)
    common.seed_all(1)
    (again, _), = common.batches(data, args, 0, 0)
    plain, _ = data.batch(torch.arange(40))
    low, high = (0 - 0.485) / 0.229, (1 - 0.406) / 0.225
    assert torch.equal(x, again) and x.min() >= low - 1e-5 and x.max() <= high + 1e-5
    assert not torch.allclose(x.sort(0).values, plain.sort(0).values, atol=0.05)  # the same images, changed


def test_a_last_batch_of_one_joins_the_batch_before_it():
    args = parsed("fedavg", "--batch-size", "4")
    assert [len(y) for _, y in common.batches(part(9), args, 0, 0)] == [4, 5]
    assert [len(y) for _, y in common.batches(part(5), args, 0, 0)] == [5]


def test_images_in_a_round():
    for flags in (("--epochs", "3"), ("--steps", "7"), ("--steps", "2"), ("--steps", "1", "--batch-size", "40")):
        args = parsed("fedavg", "--batch-size", "4", *flags)
        assert common.images_in_round(9, args) == sum(len(y) for _, y in common.batches(part(9), args, 0, 0))


def test_pixels():
    images = torch.tensor([[[[0, 255], [51, 102]]] * 3], dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    data = common.Data(images, torch.tensor([0]), torch.tensor([1]), "cpu", "unit")
    x, y = data.batch(torch.tensor([0]))
    torch.testing.assert_close(x[0, 0], torch.tensor([[0, 1], [0.2, 0.4]]))
    assert x.is_contiguous(memory_format=torch.channels_last) and y.item() == 1
    x, _ = dataclasses.replace(data, normalize="imagenet").batch(torch.tensor([0]))
    torch.testing.assert_close(x[0, :, 0, 1], (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225]))


# Backbones and tools


@pytest.mark.parametrize("name,size,dim", [("smallcnn", 28, 64), ("smallcnn_bn", 20, 64), ("alexnet_bn", 64, 1024),
                                           ("alexnet", 64, 4096), ("resnet18", 32, 512), ("resnet50", 32, 2048),
                                           ("resnet18_3x3", 32, 512), ("vit_b8", 32, 768)])
def test_backbones(name, size, dim):
    net = common.backbone(parsed("fedavg", "--backbone", name, "--image-size", size), 3, 5).eval()
    z = net.features(torch.rand(2, 3, size, size))
    assert z.shape == (2, dim) and net.classify(z).shape == (2, 5)
    if name == "vit_b8":
        assert net.body.conv_proj.kernel_size == (8, 8)
    if name == "resnet18_3x3":
        assert net.body.conv1.kernel_size == (3, 3) and net.body.conv1.stride == (1, 1)


def test_weights_from_a_file(tmp_path):
    """Torchvision's names (its head of 1,000 classes is left out), our own names, and files that do not fit."""
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    net = common.backbone(parsed("fedavg", "--backbone", "resnet18", "--weights", tmp_path / "resnet18.pth"), 3, 7)
    assert torch.equal(net.body.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight) and net.head.out_features == 7
    torch.save(net.state_dict(), tmp_path / "ours.pth")
    again = common.backbone(parsed("fedavg", "--backbone", "resnet18", "--weights", tmp_path / "ours.pth"), 3, 7)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values()))
    other_head = common.backbone(parsed("fedavg", "--backbone", "resnet18", "--weights", tmp_path / "ours.pth"), 3, 9)
    assert torch.equal(other_head.body.conv1.weight, net.body.conv1.weight) and other_head.head.out_features == 9
    with pytest.raises(common.Stop, match="does not fit the network: .* tensors are missing"):
        common.backbone(parsed("fedavg", "--backbone", "resnet50", "--weights", tmp_path / "ours.pth"), 3, 7)


def test_imagenet_weights_path(monkeypatch):
    """Torchvision's own loader is asked for the right weights with its hash check; the download itself is replaced."""
    theirs, asked = torchvision.models.alexnet(), []
    monkeypatch.setattr(torchvision.models.AlexNet_Weights, "get_state_dict",
                        lambda self, **kw: asked.append((str(self), kw)) or theirs.state_dict())
    net = common.backbone(parsed("fedavg", "--backbone", "alexnet", "--weights", "imagenet"), 3, 7)
    assert torch.equal(net.body.classifier[4].weight, theirs.classifier[4].weight)
    assert asked == [("AlexNet_Weights.IMAGENET1K_V1", {"progress": True, "check_hash": True})]


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("what", ["weights", "checkpoint"])
def test_loading_never_runs_code(tmp_path, monkeypatch, capsys, what):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run" / "checkpoint.pt"
    path.parent.mkdir()
    torch.save({"body.x": Attack()}, path)
    flags = ("--weights", path) if what == "weights" else ()
    fails(capsys, 1, "cannot be read as a file of", run_here, "fedavg",
          tmp_path / ("run" if what == "checkpoint" else "other"), *flags)
    assert not (tmp_path / "attacked").exists()


def test_average_and_bytes():
    states = [{"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}, {"a": torch.tensor([3.0, 6.0]), "n": torch.tensor(6)}]
    mean = common.average(states, torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(mean["a"], torch.tensor([2.5, 5.0]))
    assert mean["n"].dtype == torch.long and mean["n"].item() == 5  # 5.25
    assert common.nbytes({"w": states[0], "x": torch.zeros(3, dtype=torch.bfloat16)}) == 8 + 8 + 6


# The round loop


class Guess(torch.nn.Module):
    """Classifies every image as `self.label`."""

    def __init__(self, label):
        super().__init__()
        self.label = label

    def forward(self, x):
        return torch.nn.functional.one_hot(torch.full((len(x),), self.label), 10).float()


def scripted(labels, log=None):
    """A federation in which client k's model after round t guesses labels[t]; nothing is trained."""
    class Server:
        def __init__(self, args, net, clients):
            self.t = -1

        def download(self, k):
            return {"t": torch.tensor(self.t)}

        def update(self, uploads, t):
            self.t = t

        def state_dict(self):
            return {"t": self.t}

        def load_state_dict(self, saved):
            self.t = saved["t"]

    class Client:
        def __init__(self, args, net, k, data):
            self.data = data

        def train(self, down, t):
            if log is not None:
                log.append((t, self.data.name))
            return {"n": torch.tensor(len(self.data.train))}

        def model(self, down):
            return Guess(labels[int(down["t"])])

        def state_dict(self):
            return {}

        def load_state_dict(self, saved):
            pass

    return Server, Client


def test_all_avg_and_the_best_validation_round(tmp_path, capsys):
    """ALL pools the images, AVG averages the clients, and the reported round is the one best on validation."""
    args = parsed("fedavg", "--rounds", "4", "--out", tmp_path / "run", "--split", "0.5/0.25/0.25")
    domains, _ = common.load_domains(args)
    clients, _ = common.make_clients(args, domains, 10)
    labels = [3, 8, 1, 0]
    val = [sum(int((c.val.labels == g).sum()) for c in clients) for g in labels]
    result = common.run(*scripted(labels), args)[0]
    best = max(range(4), key=lambda i: (val[i], -i))
    assert result["best"]["round"] == best + 1 and result["last"]["round"] == 4
    hits = [int((c.test.labels == labels[best]).sum()) for c in clients]
    sizes = [len(c.test) for c in clients]
    assert result["best"]["ALL"] == sum(hits) / sum(sizes)
    assert abs(result["best"]["AVG"] - sum(h / n for h, n in zip(hits, sizes)) / 6) < 1e-12


def test_participation_bytes_and_evaluation_interval(tmp_path, capsys):
    log = []
    args = parsed("fedavg", "--rounds", "5", "--participation", "0.5", "--eval-every", "3", "--out", tmp_path / "run")
    result = common.run(*scripted([0] * 5, log), args)[0]
    rounds = metrics(tmp_path / "run")
    for t in range(5):
        trained = [name for r, name in log if r == t]
        assert len(trained) == len(set(trained)) == 3 and set(rounds[t]["clients"]) == set(trained)
    assert len({tuple(sorted(n for r, n in log if r == t)) for t in range(5)}) > 1
    assert [("val" in r) for r in rounds] == [False, False, True, False, True]
    assert rounds[0]["clients"][log[0][1]]["bytes_up"] == 8 and result["bytes"]["up"] == 5 * 3 * 8


def test_output_folder(tmp_path):
    result = run_here("fedavg", tmp_path / "run", "--record", tmp_path / "results" / "runs.jsonl")
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert saved == result
    assert {"args", "command", "best", "last", "curve", "bytes", "seconds", "images_per_second", "peak_memory_mib", "commit",
            "versions", "hardware"} <= saved.keys() and saved["args"]["seed"] == 0
    assert Image.open(tmp_path / "run" / "curves.png").size[0] > 500
    assert run_here("fedavg", tmp_path / "run", "--record", tmp_path / "results" / "runs.jsonl") == result  # not run again
    lines = (tmp_path / "results" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0]) == result


def test_lodo_over_all_targets(tmp_path, capsys):
    module, build = METHODS["fedavg"]
    args = parsed("fedavg", "--scale", "smoke", "--protocol", "lodo", "--out", tmp_path / "run")
    results = common.run(module.Server, module.Client, args, build)
    assert [r["args"]["target"] for r in results] == ["d0", "d15", "d30", "d45", "d60", "d75"]
    assert all(r["args"]["target"] not in r["best"]["clients"] and 0 <= r["best"]["target"] <= 1 for r in results)
    assert "left-out domain" in capsys.readouterr().out


def test_the_recorded_command_can_be_typed_elsewhere(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/fdse.py", "--no-resume", "--archives", "/a", "--weights", "my weights.pt",
                                     "--no-consensus", "--out=/o", "--checkpoint-every", "0", "--seed", "1"])
    monkeypatch.setattr("__main__.__spec__", None)
    assert common.command() == "python fdse.py --weights 'my weights.pt' --no-consensus --seed 1"
    monkeypatch.setattr("__main__.__spec__", type("Spec", (), {"name": "baselines.fedema"}))
    assert common.command() == "python -m baselines.fedema --weights 'my weights.pt' --no-consensus --seed 1"


@pytest.mark.parametrize("method", METHODS)
def test_the_same_command_gives_the_same_bytes(tmp_path, method):
    for out in ("a", "b"):
        run_here(method, tmp_path / out, "--precision", "auto", *one_run(method))
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == (tmp_path / "b" / "metrics.jsonl").read_bytes()


def test_another_run_in_the_folder_is_refused(tmp_path, capsys):
    run_here("fedavg", tmp_path / "run")
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    fails(capsys, 2, "holds a run of other arguments.*lr 0.05, not 0.2", run_here, "fedavg", tmp_path / "run", "--lr", "0.2")
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    assert run_here("fedavg", tmp_path / "run", "--lr", "0.2", "--no-resume")["args"]["lr"] == 0.2


def test_results_and_checkpoints_that_are_not_this_runs(tmp_path, capsys):
    """A foreign or damaged result is never taken for ours, a damaged checkpoint is named, and nothing is deleted before the
    new run stands."""
    out = tmp_path / "run"
    mine = run_here("fedavg", out)
    result, checkpoint = (out / "result.json"), (out / "checkpoint.pt")
    result.write_text("[")
    again = run_here("fedavg", out)
    assert again["best"] == mine["best"] and json.loads(result.read_text()) == again
    fails(capsys, 2, "takes colour images", run_here, "fedavg", out, "--no-resume", "--backbone", "resnet18")
    assert checkpoint.exists() and result.exists()
    content = torch.load(checkpoint, weights_only=True) | {"round": 1}
    for damage in ({"history": 3}, {"round": 99}, {"round": "2"}, {"identity": "["}, {"best": {"round": 1}}, {"server": {}},
                   {"server": {"w": {"x": torch.zeros(1)}}}):
        torch.save(content | damage, checkpoint)
        result.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as end:
            run_here("fedavg", out)
        assert end.value.code in (1, 2) and "--no-resume" in capsys.readouterr().err
    result.write_text(json.dumps(mine))
    checkpoint.unlink()
    fails(capsys, 2, "holds a run of other arguments.*seed 0, not 5", run_here, "fedavg", out, "--seed", "5")


def test_weights_are_known_by_their_content(tmp_path):
    keys = []
    for value in (0.0, 1.0):
        torch.save({"x": torch.tensor(value)}, tmp_path / "w.pt")
        keys.append(common.identity(parsed("fedavg", "--weights", tmp_path / "w.pt")))
    assert keys[0] != keys[1]


def test_record_survives_damaged_lines(tmp_path):
    path = tmp_path / "runs.jsonl"
    result = run_here("fedavg", tmp_path / "run")
    cut = json.dumps(result)[:200]
    path.write_bytes(b"\xff\n" + cut.encode())
    for _ in range(2):
        common.record(parsed("fedavg", "--record", path), result)
    lines = path.read_bytes().splitlines()
    assert lines[1] == cut.encode() and json.loads(lines[2]) == result and len(lines) == 3


def test_two_processes_in_one_folder(tmp_path, capsys):
    with common.locked(tmp_path / "run" / ".lock"):
        fails(capsys, 1, "another process is running", run_here, "fedavg", tmp_path / "run")


def test_nan_stops_and_keeps_the_last_good_checkpoint(tmp_path, capsys):
    fails(capsys, 1, r"round \d+, client d\d+: the loss or the weights are no longer finite.*lower --lr", run_here, "fedavg",
          tmp_path / "run", "--lr", "1e6", "--rounds", "50", "--momentum", "1", "--checkpoint-every", "0", "--weight-decay",
          "1")
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["round"] >= 1 and all(torch.isfinite(v).all() for v in saved["server"]["w"].values())


def test_an_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    fails(capsys, 1, "file", run_here, "fedavg", tmp_path / "file" / "run")
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    read_only.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.getuid():  # root may write everywhere
        fails(capsys, 1, "Permission denied", run_here, "fedavg", read_only / "run")


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path):
    """The file size limit stops the write in the middle, as a full disk does."""
    run_here("fedavg", tmp_path / "run", "--rounds", "1")
    good = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    code = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); import common, fedavg; "
            f"common.write_whole(__import__('pathlib').Path({str(tmp_path / 'run' / 'checkpoint.pt')!r}), "
            "lambda f: common.save({'x': __import__('torch').zeros(10**6)}, f))")
    done = start("-c", code)
    assert "OSError" in done.communicate()[1]
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == good and not list((tmp_path / "run").glob("*.tmp"))
    code = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "import fedavg, common; args = fedavg.arguments(['--scale', 'smoke', '--out', "
            f"{str(tmp_path / 'full')!r}]); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
            "common.run(fedavg.Server, fedavg.Client, args)")
    done = start("-c", code)
    error = done.communicate()[1].strip().splitlines()[-1]
    assert done.returncode == 1 and error.startswith("fedavg: ") and "too large" in error


@pytest.mark.parametrize("method", SEVERAL)
def test_killed_at_random_moments(tmp_path, method):
    """SIGKILL at random moments and start again until the run is through: the same metrics to the byte. The long test of
    this name kills more often."""
    kill_and_resume(tmp_path, method, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_ten_times(tmp_path, method):
    kill_and_resume(tmp_path, method, kills=10)


def kill_and_resume(tmp_path, method, kills):
    rounds = 4 + 2 * kills
    flags = [*script(method), "--scale", "smoke", *one_run(method), "--rounds", rounds, "--checkpoint-every", 0, "--out"]
    done = start(*flags, tmp_path / "whole")
    assert done.wait() == 0
    rng, out, killed = random.Random(0), tmp_path / "killed", 0
    for kill in range(kills):
        process = start(*flags, out)
        done_before = len(metrics(out)) if (out / "metrics.jsonl").exists() else 0
        while process.poll() is None and (not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text()
                                                                                      .splitlines()) <= done_before):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL and not (out / "result.json").exists()
    assert killed
    assert start(*flags, out).wait() == 0
    assert (out / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("whole", "killed")]
    assert results[0]["best"] == results[1]["best"] and results[0]["bytes"] == results[1]["bytes"]


@pytest.mark.parametrize("counts", [(2,), pytest.param((1, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", SEVERAL)
def test_several_processes_give_the_single_process_result(tmp_path, method, counts):
    """After 3 rounds every parameter is within 1e-5, for 1, 2 and 3 processes; fp32."""
    flags = [*script(method), "--scale", "smoke", *one_run(method), "--rounds", 3, "--precision", "fp32", "--out"]
    assert start(*flags, tmp_path / "single").wait() == 0
    single = torch.load(tmp_path / "single" / "checkpoint.pt", weights_only=True)
    for n in counts:
        process = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n, *flags, tmp_path / f"p{n}")
        assert process.wait() == 0, process.stderr.read()
        several = torch.load(tmp_path / f"p{n}" / "checkpoint.pt", weights_only=True)
        for part in ("server", "clients"):
            for a, b in zip(common.tensors_of(numbers_out(single[part])), common.tensors_of(numbers_out(several[part]))):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        assert [m.get("test", m.get("linear")) for m in metrics(tmp_path / f"p{n}")] == [
            m.get("test", m.get("linear")) for m in metrics(tmp_path / "single")]


def test_one_of_two_processes_fails(tmp_path):
    """One line says what happened, also when the other process only notices that its peer has gone."""
    process = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "fedavg.py", "--scale", "smoke", "--lr",
                    1e6, "--momentum", 1, "--weight-decay", 1, "--rounds", 50, "--out", tmp_path / "run")
    error = process.communicate()[1]
    assert process.returncode and "common.py" not in error  # torchrun's own report has a traceback, ours has none
    assert sum("no longer finite" in line for line in error.splitlines()) >= 1


def numbers_out(value):
    return {k: numbers_out(v) for k, v in value.items() if not isinstance(v, (int, float))} if isinstance(value, dict) else value


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--views", "--size", "40"], ["--methods"]])
def test_the_benchmark_runs(tmp_path, flags):
    """Its numbers are no test; that it measures every row is."""
    done = subprocess.run([sys.executable, "-m", "tests.bench", *flags, "--rounds", "1", "--out", str(tmp_path / "b.json")], cwd=ROOT)
    assert done.returncode == 0 and len(json.loads((tmp_path / "b.json").read_text())["rows"]) >= 4
