"""The common ground: domains, splits, batches, backbones, averaging, evaluation, the round loop, and bad settings."""

import dataclasses
import gzip
import hashlib

import common
from tests.conftest import METHODS, fails, metrics, parsed, run_here

import numpy as np
import pytest
import torch
import torchvision


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


def test_digits_are_dealt_out_once():
    dealt = common.load_digits(28)
    assert [d.name for d in dealt] == ["d0", "d15", "d30", "d45", "d60", "d75"]
    assert sum(len(d.labels) for d in dealt) == 1797 and dealt[0].images.shape[1:] == (1, 28, 28)
    assert all(len(d.labels.unique()) == 10 for d in dealt)
    upright = [d.images.float().mean() for d in dealt]
    assert max(upright) - min(upright) < 8  # turned, not lost


def test_rotation_is_counter_clockwise_and_not_of_labels():
    image = torch.zeros(1, 1, 29, 29, dtype=torch.uint8)
    image[0, 0, 14, 20:] = 255  # a ray to the right
    turned = common.rotate(image, 90, 29)[0, 0]
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


def test_average_and_bytes():
    states = [{"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}, {"a": torch.tensor([3.0, 6.0]), "n": torch.tensor(6)}]
    mean = common.average(states, torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(mean["a"], torch.tensor([2.5, 5.0]))
    assert mean["n"].dtype == torch.long and mean["n"].item() == 5  # 5.25
    assert common.nbytes({"w": states[0], "x": torch.zeros(3, dtype=torch.bfloat16)}) == 8 + 8 + 6


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


def test_lodo_over_all_targets(tmp_path, capsys):
    module, build = METHODS["fedavg"]
    args = parsed("fedavg", "--scale", "smoke", "--protocol", "lodo", "--out", tmp_path / "run")
    results = common.run(module.Server, module.Client, args, build)
    assert [r["args"]["target"] for r in results] == ["d0", "d15", "d30", "d45", "d60", "d75"]
    assert all(r["args"]["target"] not in r["best"]["clients"] and 0 <= r["best"]["target"] <= 1 for r in results)
    assert "left-out domain" in capsys.readouterr().out
