"""The common ground: domains, batches and weights. Splits and the rounds are in test_round_loop.py, networks
in test_networks_by_hand.py."""

import gzip
import hashlib

import common
from baselines import local
from plumbing.data import mnist
from tests.conftest import parsed, stops

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

DOMAINS = ["d0", "d15", "d30", "d45", "d60", "d75"]  # of the digits


def test_digits_are_dealt_out_once():
    """And turned, none of them out of its image."""
    dealt = common.open_dataset(parsed("fedavg")).domains
    assert {d.name: d.images.shape[1:] for d in dealt} == dict.fromkeys(DOMAINS, (1, 28, 28))
    assert sum(len(d.labels) for d in dealt) == 1797
    as_they_are = common.open_dataset(parsed("fedavg", "--image-size", 8)).domains[0].images.flatten(1)
    theirs = (load_digits().data * 255 / 16).round()  # of 17 shades
    assert {*map(tuple, as_they_are.tolist())} <= {*map(tuple, theirs.tolist())}


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
        domains = common.open_dataset(args).domains
        rows = [int(line.split(",")[column]) for line in lists]
        for i in (0, 1, 999):
            picture = Image.fromarray(images[rows[i], 0].numpy())
            for d, angle in zip(domains, (0, 15, 30, 45, 60, 75), strict=True):
                assert np.array_equal(d.images[i, 0].numpy(), np.array(picture.rotate(angle)))
                assert d.labels[i] == rows[i] % 10


LODO = ["--protocol", "lodo", "--target", "d30"]


def federated(args):
    """The domains of `args`, its clients and its targets."""
    dataset = common.open_dataset(args)
    return dataset.domains, *common.split(dataset, args)


def test_twins_of_rotatedmnist_are_in_the_same_part(tmp_path, monkeypatch):
    """None of the six rotations of a source's test image is trained on."""
    fake_mnist(tmp_path, monkeypatch)
    of_mnist = ["--dataset", "rotatedmnist-t10k", "--archives", tmp_path, "--protocol", "indomain"]
    domains, clients, _ = federated(parsed("fedavg", *of_mnist, "--limit", "200", "--clients-per-domain", "2",
                                     "--dirichlet", "1"))
    tested = torch.cat([client.test.index % 200 for client in clients])
    trained = torch.cat([client.train.index % 200 for client in clients])
    assert set(tested.tolist()).isdisjoint(trained.tolist())
    assert all(torch.equal(d.labels, domains[0].labels) for d in domains)


def test_augmentation_is_for_training_alone_and_comes_before_normalization():
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8)
    data = common.Data(images, torch.arange(40), torch.zeros(40).long(), "cpu", "imagenet")
    args = parsed("fedavg", "--augment", "simclr", "--batch-size", "40")
    (x, _), = common.batches(data, args, 0, 0)
    plain, _ = data.batch(torch.arange(40))
    lowest, highest = (0 - 0.485) / 0.229, (1 - 0.406) / 0.225
    assert x.min() >= lowest - 1e-5 and x.max() <= highest + 1e-5
    assert not torch.allclose(x.sort(0).values, plain.sort(0).values, atol=0.05)  # the same images, changed


def network(name: str, weights, classes: int, **how) -> common.Net:
    """A network with weights from a file."""
    args = parsed("fedavg", "--backbone", name, "--weights", weights)
    return common.backbone(args, 3, classes, **how)


def test_weights_with_torchvisions_names(tmp_path):
    """Its head of 1,000 classes is left out, or the last layer but one, as FedADG's classifier on AlexNet."""
    theirs, file = torchvision.models.resnet18(), tmp_path / "resnet18.pth"
    torch.save(theirs.state_dict(), file)
    net = network("resnet18", file, 7)
    assert torch.equal(net.body.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    assert net.head.out_features == 7
    last, head = network("resnet18", file, 7, keep_last=True).head
    assert torch.equal(last.weight, theirs.fc.weight) and head.out_features == 7


def test_a_state_that_does_not_fit_is_refused():
    """Also one whose tensors would be stretched to the network's."""
    net = nn.Linear(2, 3)
    for other in ({"bias": torch.zeros(1)}, {"weight": torch.zeros(3, 1)}, {"more": torch.zeros(3)}):
        with pytest.raises(RuntimeError):
            common.load(net, common.state(net) | other)


def test_weights_with_our_names(tmp_path):
    """With a head of other classes than ours it is left out."""
    file, ours = tmp_path / "ours.pth", network("smallcnn_bn", "none", 7).state_dict()
    for classes, shared in ((7, ours), (9, [name for name in ours if "head" not in name])):
        torch.save(ours, file)
        again = network("smallcnn_bn", file, classes).state_dict()
        assert len(again) == len(ours) and all(torch.equal(again[name], ours[name]) for name in shared)
    name = next(name for name in ours if "running_var" in name)
    without = {key: v for key, v in ours.items() if key != name}
    for backbone, content, words in (("smallcnn", ours, ""), ("smallcnn_bn", without, name),
                                     ("smallcnn_bn", ours | {name: torch.zeros(3)}, name)):
        torch.save(content, file)
        stops(f"does not fit the network.*{words}", network, backbone, file, 7, code=2)

# What many clients cost


def test_untrained_clients_keep_one_network(tmp_path):
    """At the start equal tensors of all clients are one. What each trains is its own: test_round_loop.py."""
    args = parsed("baselines.local", "--out", tmp_path)
    dataset = common.open_dataset(args)
    fed = common.federation(local.Server, local.Client, args, common.backbone, dataset)
    starts = [client.w for client in fed.clients.values()]
    assert len({w["head.weight"].data_ptr() for w in starts}) == 1


def test_a_restored_state_is_where_its_parameter_is():
    """PartialFed's scores are in the main memory, whatever the device; a checkpoint has tensors elsewhere."""
    net = nn.Linear(2, 1, bias=False, device="meta")
    kept = {"weight": {"exp_avg": torch.ones(1, 2), "step": torch.ones(())}}
    opt = common.restore_optimizer(torch.optim.Adam(net.parameters()), net, kept)
    assert opt.state[net.weight]["exp_avg"].is_meta and opt.state[net.weight]["step"].is_cpu
