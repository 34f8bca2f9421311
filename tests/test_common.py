"""The common ground: domains, splits, batches, backbones, averaging, the round loop, and bad settings."""

import dataclasses
import gzip
import hashlib
import json
import random

import common
from plumbing import dirichlet, mnist
from tests.conftest import metrics, parsed

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

DOMAINS = ["d0", "d15", "d30", "d45", "d60", "d75"]  # of the digits


# Domains


def test_digits_are_dealt_out_once():
    """And turned, none of them out of its image."""
    dealt, _ = common.load_domains(parsed("fedavg"))
    assert [d.name for d in dealt] == DOMAINS
    assert sum(len(d.labels) for d in dealt) == 1797
    for d in dealt:
        assert d.images.shape[1:] == (1, 28, 28)
        assert len(d.labels.unique()) == 10
    brightness = [float(d.images.float().mean()) for d in dealt]
    assert max(brightness) - min(brightness) < 8


def test_rotation_is_counter_clockwise():
    image = torch.zeros(1, 1, 29, 29, dtype=torch.uint8)
    image[0, 0, 14, 20:] = 255  # a ray to the right
    turned = common.rotate(image, 90, 29)[0, 0]
    assert turned[:9, 14].min() == 255 and turned[20:, 14].max() == 0  # now to the top


def write_idx(path, numbers: tuple[int, ...], values: np.ndarray) -> tuple[str, str]:
    """A file in MNIST's format, after its header of numbers; returns its name and md5."""
    header = b"".join(number.to_bytes(4, "big") for number in numbers)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes(), 1))
    return path.name, hashlib.md5(path.read_bytes()).hexdigest()


def fake_mnist(folder, monkeypatch, count=10000):
    """MNIST's test part with noise for images and the classes in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 255, (count, 784), dtype=np.uint8)
    labels = np.arange(count) % 10
    md5s = [
        write_idx(folder / "t10k-images-idx3-ubyte.gz", (2051, count, 28, 28), images),
        write_idx(folder / "t10k-labels-idx1-ubyte.gz", (2049, count), labels),
    ]
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", md5s)


def test_rotatedmnist_is_the_published_one(monkeypatch):
    """The seed picks one of the ten published lists of MNIST's training images; each turned image is what
    PIL's rotation by the nearest pixel gives, as in DIRT and DIVA."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (60000, 1, 28, 28), dtype=np.uint8))
    labels = torch.arange(60000) % 10
    of_files = {"images": images, "labels": labels.byte()}
    monkeypatch.setattr(mnist, "read_idx", lambda name, *where, **how: of_files[name.split("-")[1]])
    lists = mnist.PUBLISHED_ROWS.read_text().split()[1:]
    for seed, column in ((0, 0), (3, 3), (13, 3)):
        args = parsed("fedsr", "--dataset", "rotatedmnist", "--seed", seed)
        domains, _ = common.load_domains(args)
        rows = [int(line.split(",")[column]) for line in lists]
        for i in (0, 1, 999):
            picture = Image.fromarray(images[rows[i], 0].numpy())
            for d, angle in zip(domains, (0, 15, 30, 45, 60, 75), strict=True):
                assert np.array_equal(d.images[i, 0].numpy(), np.array(picture.rotate(angle)))
                assert d.labels[i] == rows[i] % 10


def test_a_damaged_mnist_is_refused(tmp_path, monkeypatch):
    fake_mnist(tmp_path, monkeypatch)
    args = parsed("fedavg", "--dataset", "rotatedmnist-t10k", "--archives", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"broken")
    with pytest.raises(common.Stop, match="expected md5"):
        common.load_domains(args)


# Splits and clients


def test_split_sizes_of_office():
    """The 10% test parts of the domains have 95, 112, 15 and 29 images (FDSE Table 2 is in fractions of
    these)."""
    sizes = []
    for n in (958, 1123, 157, 295):
        parts = common.cut(torch.arange(n), (0.8, 0.1, 0.1))
        sizes.append([len(part) for part in parts])
    assert [test for _, _, test in sizes] == [95, 112, 15, 29]
    assert sizes[2] == [126, 16, 15]


LODO = ["--protocol", "lodo", "--target", "d30"]


def federated(args):
    """The domains of `args`, its clients and its targets."""
    dataset = common.open_dataset(args)
    clients, targets = common.split(dataset, args)
    return dataset.domains, clients, targets


@pytest.mark.parametrize("flags", [
    [],
    ["--clients-per-domain", "3"],
    ["--clients-per-domain", "3", "--dirichlet", "2"],
    LODO,
    [*LODO, "--target-part", "test"],
])
def test_every_image_is_in_one_part_of_one_client(flags):
    args = parsed("fedavg", *flags)
    domains, clients, targets = federated(args)
    assert len(targets) == ("lodo" in flags)
    assert len(clients) == (6 - len(targets)) * args.clients_per_domain
    for d in domains:
        rows = []
        for client in clients + targets:
            if client.name.split("-")[0] != d.name:
                continue
            for part in (client.train, client.val, client.test):
                assert torch.equal(part.labels, d.labels[part.index])
                rows += part.index.tolist()
        assert sorted(rows) == list(range(len(d.labels)))


def test_the_seed_decides_the_split():
    args = parsed("fedavg", *LODO, "--target-part", "test")
    _, clients, _ = federated(args)
    _, again, _ = federated(args)
    _, other, _ = federated(dataclasses.replace(args, seed=1))
    for a, b in zip(clients, again):
        assert torch.equal(a.train.index, b.train.index)
    assert not torch.equal(clients[0].train.index, other[0].train.index)


def test_dirichlet_shares_are_drawn_until_each_client_has_enough():
    """With beta 0.1 a first draw leaves some client of eight without a test image; the next one that does not
    is taken, the same for the same seed."""
    flags = ["--clients-per-domain", "8", "--dirichlet", "0.1", "--seed", "1"]
    _, clients, _ = federated(parsed("fedavg", *flags))
    for client in clients:
        assert len(client.train) >= 2 and len(client.val) >= 1 and len(client.test) >= 1
    _, again, _ = federated(parsed("fedavg", *flags))
    for a, b in zip(clients, again, strict=True):
        assert torch.equal(a.train.index, b.train.index)
    first = np.random.default_rng(common.seed_all(1, "dirichlet", "d0").initial_seed())
    domains, _ = common.load_domains(parsed("fedavg"))
    piles = dirichlet.draw(torch.arange(300), domains[0].labels, 10, 8, 0.1, first)
    assert min(len(pile) for pile in piles) < 10  # so that domain was drawn again


def test_twins_of_rotatedmnist_are_in_the_same_part(tmp_path, monkeypatch):
    """None of the six rotations of a source's test image is trained on."""
    flags = ["--limit", "200", "--clients-per-domain", "2", "--dirichlet", "1"]
    fake_mnist(tmp_path, monkeypatch)
    of_mnist = ["--dataset", "rotatedmnist-t10k", "--archives", tmp_path, "--protocol", "indomain"]
    domains, clients, _ = federated(parsed("fedavg", *of_mnist, *flags))
    tested = torch.cat([client.test.index for client in clients])
    trained = torch.cat([client.train.index for client in clients])
    assert set(tested.tolist()).isdisjoint(trained.tolist())

    upright = domains[0]
    centres = upright.images[:, 0, 10:18, 10:18].flatten(1)
    assert len(centres.unique(dim=0)) > 0.9 * len(upright.labels)  # the images differ
    for d in domains[1:]:  # row i shows the same image in every domain
        assert torch.equal(d.labels, upright.labels)
        picture = Image.fromarray(upright.images[7, 0].numpy()).rotate(int(d.name[1:]))
        assert np.array_equal(d.images[7, 0].numpy(), np.array(picture))


def test_dirichlet_skews_the_labels():
    skewed = ["--clients-per-domain", "2", "--dirichlet", "0.3", "--split", "0.6/0.2/0.2"]
    _, clients, _ = federated(parsed("fedavg", *skewed))
    counts = [client.train.labels.bincount(minlength=10) for client in clients[:2]]
    shares = [n.float() / n.sum() for n in counts]
    assert (shares[0] - shares[1]).abs().sum() > 0.5


# Batches


def part(n: int) -> common.Data:
    """n images, each with a label of its own."""
    images = torch.zeros(n, 1, 2, 2, dtype=torch.uint8)
    return common.Data(images, torch.arange(n), torch.arange(n), "cpu", "unit")


def labels_in_batches(n: int, args, t: int = 0, k: int = 0) -> list[list[int]]:
    """The labels of each batch of client k in round t."""
    return [y.tolist() for _, y in common.batches(part(n), args, t, k)]


def test_each_epoch_has_every_image_once_in_a_new_order():
    """The labels of two epochs are the numbers of the images, counted."""
    args = parsed("fedavg", "--batch-size", "4", "--epochs", "2")
    labels = labels_in_batches(10, args)
    assert [len(y) for y in labels] == [4, 4, 2, 4, 4, 2]
    first, second = labels[:3], labels[3:]
    assert first != second and labels != labels_in_batches(10, args, t=1) != labels_in_batches(10, args, k=1)
    for epoch in (first, second):
        assert sorted(np.concatenate(epoch)) == list(range(10))


def test_a_number_of_steps_takes_the_place_of_epochs():
    """Sizes of the batches, counted: 7 steps of 10 images in batches of 4."""
    args = parsed("fedavg", "--batch-size", "4", "--epochs", "2", "--steps", "7")
    assert [len(y) for y in labels_in_batches(10, args)] == [4, 4, 2, 4, 4, 2, 4]


def test_a_last_batch_of_one_joins_the_batch_before_it():
    args = parsed("fedavg", "--batch-size", "4")
    assert [len(y) for y in labels_in_batches(9, args)] == [4, 5]
    assert [len(y) for y in labels_in_batches(5, args)] == [5]


@pytest.mark.parametrize("flags", [["--epochs", "3"], ["--steps", "7"]])
def test_images_in_a_round(flags):
    args = parsed("fedavg", "--batch-size", "4", *flags)
    assert common.images_in_round(9, args) == sum(len(y) for y in labels_in_batches(9, args))


def test_augmentation_is_for_training_alone_and_comes_before_normalization():
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8)
    data = common.Data(images, torch.arange(40), torch.zeros(40).long(), "cpu", "imagenet")
    args = parsed("fedavg", "--augment", "simclr", "--batch-size", "40")
    drawn = []
    for _ in range(2):
        common.seed_all(1)
        (x, _), = common.batches(data, args, 0, 0)
        drawn.append(x)
    x = drawn[0]
    plain, _ = data.batch(torch.arange(40))
    lowest, highest = (0 - 0.485) / 0.229, (1 - 0.406) / 0.225
    assert torch.equal(x, drawn[1])
    assert x.min() >= lowest - 1e-5 and x.max() <= highest + 1e-5
    assert not torch.allclose(x.sort(0).values, plain.sort(0).values, atol=0.05)  # the same images, changed


def test_pixels():
    images = torch.tensor([[[[0, 255], [51, 102]]] * 3], dtype=torch.uint8)
    images = images.contiguous(memory_format=torch.channels_last)
    data = common.Data(images, torch.tensor([0]), torch.tensor([1]), "cpu", "unit")
    x, y = data.batch(torch.tensor([0]))
    torch.testing.assert_close(x[0, 0], torch.tensor([[0, 1], [0.2, 0.4]]))
    assert x.is_contiguous(memory_format=torch.channels_last) and y.item() == 1


# Backbones and weights


@pytest.mark.parametrize("name,size,dim", [
    ("smallcnn", 28, 64),
    ("smallcnn_bn", 20, 64),
    ("alexnet_bn", 64, 1024),
    ("alexnet", 64, 4096),
    ("resnet18", 32, 512),
    ("resnet50", 32, 2048),
    ("resnet18_3x3", 32, 512),
    ("vit_b8", 32, 768),
])
def test_backbones(name, size, dim):
    net = common.backbone(parsed("fedavg", "--backbone", name, "--image-size", size), 3, 5).eval()
    z = net.features(torch.rand(2, 3, size, size))
    assert z.shape == (2, dim) and net.classify(z).shape == (2, 5)
    assert common.BACKBONES[name].dim == dim
    assert common.BACKBONES[name].relu == (z.min() >= 0)
    if name == "vit_b8":
        assert net.body.conv_proj.kernel_size == (8, 8)
    if name == "resnet18_3x3":
        assert net.body.conv1.kernel_size == (3, 3) and net.body.conv1.stride == (1, 1)


def network(name: str, weights, classes: int) -> common.Net:
    """A network with weights from a file."""
    args = parsed("fedavg", "--backbone", name, "--weights", weights)
    return common.backbone(args, 3, classes)


def test_weights_with_torchvisions_names(tmp_path):
    """Its head of 1,000 classes is left out."""
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    net = network("resnet18", tmp_path / "resnet18.pth", 7)
    assert torch.equal(net.body.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    assert net.head.out_features == 7


def test_weights_with_our_names(tmp_path):
    net = common.backbone(parsed("fedavg", "--backbone", "resnet18"), 3, 7)
    torch.save(net.state_dict(), tmp_path / "ours.pth")
    again = network("resnet18", tmp_path / "ours.pth", 7)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    other_head = network("resnet18", tmp_path / "ours.pth", 9)
    assert torch.equal(other_head.body.conv1.weight, net.body.conv1.weight)
    assert other_head.head.out_features == 9
    with pytest.raises(common.Stop, match="does not fit the network: .* tensors are missing"):
        network("resnet50", tmp_path / "ours.pth", 7)


# States


def test_average():
    states = [
        {"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        {"a": torch.tensor([3.0, 6.0]), "n": torch.tensor(6)},
    ]
    mean = common.average(states, torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(mean["a"], torch.tensor([2.5, 5.0]))
    assert mean["n"].dtype == torch.long and mean["n"].item() == 5  # 5.25


# The round loop


class Guess(torch.nn.Module):
    """Classifies every image as `self.label`."""

    def __init__(self, label: int):
        super().__init__()
        self.label = label

    def forward(self, x):
        logits = torch.zeros(len(x), 10)
        logits[:, self.label] = 1
        return logits


class Clock:
    """A server that knows only which round was the last one; the downloads say it, -1 at the start."""

    keeps = ("t",)

    def __init__(self, args, net, clients):
        self.t = -1

    def download(self, k):
        return {"t": torch.tensor(self.t)}

    def update(self, uploads, t):
        self.t = t


def test_numpys_and_pythons_random_numbers_are_seeded_too():
    """A method of one's own may use them."""
    drawn = []
    for key in (("train", 3), ("train", 3), ("train", 4)):
        common.seed_all(*key)
        drawn.append((np.random.beta(1, 1), random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    assert not set(drawn[1]) & set(drawn[2])


def guessing(guesses: list[int], log: list | None = None) -> type:
    """A client whose model after round t guesses the label guesses[t], and which trains nothing.

    `log` gets the round and the client's name of each local training.
    """
    class Client:
        keeps = ()

        def __init__(self, args, net, k, data):
            self.data = data

        def train(self, down, t):
            if log is not None:
                log.append((t, self.data.name))
            return {"n": torch.tensor(len(self.data.train))}

        def model(self, down):
            return Guess(guesses[int(down["t"])])

    return Client


def hits(parts: list[common.Data], guess: int) -> list[int]:
    """How many images of each part have the label `guess`."""
    return [int((part.labels == guess).sum()) for part in parts]


def best_round(clients: list[common.ClientData], guesses: list[int]) -> int:
    """The round after which the guess is right most often on the validation images; the first of equals."""
    right = [sum(hits([client.val for client in clients], guess)) for guess in guesses]
    return right.index(max(right))


def test_all_avg_and_the_best_validation_round(tmp_path):
    """ALL pools the images, AVG averages the clients; the reported round is the one best on validation."""
    guesses = [3, 8, 1, 0]
    args = parsed("fedavg", "--rounds", "4", "--out", tmp_path / "run", "--split", "0.5/0.25/0.25")
    result, = common.run(Clock, guessing(guesses), args)
    _, clients, _ = federated(args)
    best = best_round(clients, guesses)
    assert result["best"]["round"] == best + 1 and result["last"]["round"] == 4
    tests = [client.test for client in clients]
    right = hits(tests, guesses[best])
    accuracies = [r / len(test) for r, test in zip(right, tests)]
    assert result["best"]["ALL"] == sum(right) / sum(len(test) for test in tests)
    assert abs(result["best"]["AVG"] - sum(accuracies) / 6) < 1e-12
    assert result["best"]["clients"] == dict(zip(DOMAINS, accuracies))


def test_participation(tmp_path):
    """Half of five clients is three; who trains, round by round, is not always the same."""
    log = []
    args = parsed("fedavg", "--rounds", "5", "--participation", "0.5", "--out", tmp_path)
    common.run(Clock, guessing([0] * 5, log), args)
    groups = set()
    for t, entry in enumerate(metrics(tmp_path)):
        trained = [name for r, name in log if r == t]
        assert len(trained) == len(set(trained)) == 3
        assert set(entry["clients"]) == set(trained)
        groups.add(tuple(trained))
    assert len(groups) > 1
    for entry in metrics(tmp_path):
        for log in entry["clients"].values():
            assert log == {"bytes_down": 8, "bytes_up": 8}


def test_evaluation_interval(tmp_path):
    args = parsed("fedavg", "--rounds", "5", "--eval-every", "3", "--out", tmp_path)
    common.run(Clock, guessing([0] * 5), args)
    evaluated = [entry["round"] for entry in metrics(tmp_path) if "val" in entry]
    assert evaluated == [3, 5]


# Leave one domain out


def test_each_target_in_turn(tmp_path, capsys):
    """--target all: a run and a folder for each, then a line with the accuracies of their best rounds."""
    guesses = [8, 3]  # the first is the better one on the validation images
    args = parsed("fedavg", "--protocol", "lodo", "--rounds", "2", "--out", tmp_path)
    results = common.run(Clock, guessing(guesses), args)
    assert [result["args"]["target"] for result in results] == DOMAINS
    assert sorted(path.name for path in tmp_path.iterdir()) == DOMAINS
    shown = []
    for target, result in zip(DOMAINS, results):
        assert json.loads((tmp_path / target / "result.json").read_text()) == result
        assert list(result["best"]["clients"]) == [name for name in DOMAINS if name != target]
        _, clients, (unseen,) = federated(dataclasses.replace(args, target=target))
        guess = guesses[best_round(clients, guesses)]
        accuracy = hits([unseen.test], guess)[0] / len(unseen.test)
        assert result["best"]["target"] == accuracy
        shown.append(accuracy)
    said = capsys.readouterr().out
    each = "  ".join(f"{name} {100 * accuracy:.2f}" for name, accuracy in zip(DOMAINS, shown))
    assert f"accuracy on each left-out domain (%): {each}  mean {100 * np.mean(shown):.2f}\n" in said
