"""The linear evaluation by hand: a run of FedGaLA on images larger than the crop, with two targets and
sources of unequal size. z, the labels that are fitted, Adam, and the statistics of the untrained network are
computed a second time, in float64."""

import copy
import math
from types import SimpleNamespace

import common
import fedgala
from plumbing.run import linear
from tests.conftest import metrics, parsed, saved_in
from tests.plain_torch import (adam_step, batch_norm_at_rest as bn, body_in_evaluation, in_double,
                               linear as product)
from tests.recording import number, shuffled

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

CROP, CLASSES, SIZES = 8, 3, {"dark": 70, "one": 150, "bright": 29, "two": 97}
DATA = f"""
import torch
from common import Domain


def load(args):
    generator, domains = torch.Generator().manual_seed(5), []
    for d, (name, n) in enumerate({SIZES}.items()):
        labels = torch.arange(n) % {CLASSES}
        pixels = torch.randint(0, 60 + 20 * d, (n, 1, 14, 14), generator=generator)
        for c in range({CLASSES}):
            pixels[labels == c, :, 4 * c:4 * c + 3] += 12
        pixels[:, :, :7] += 25 * d
        domains.append(Domain(name, pixels.to(torch.uint8), labels))
    return domains, ("a", "b", "c")
"""
FLAGS = ["--sources", "dark,bright", "--label-ratio", "0.12/0.3", "--crop", CROP, "--rounds", 2,
         "--epochs", 2, "--batch-size", 32, "--augment", "none", "--hidden", 20, "--dim", 12,
         "--linear-epochs", 6, "--linear-batch", 7, "--linear-lr", 0.01, "--lr", 0.0005, "--eval-every", 1,
         "--seed", 4, "--backbone", "smallcnn_bn", "--precision", "fp32", "--device", "cpu", "--no-figures"]


def shrunk(images: Tensor) -> Tensor:
    """x [N, 1, CROP, CROP] of uint8 images, antialiased by PIL."""
    small = [np.asarray(Image.fromarray(image[0].numpy().astype(np.float32)).resize((CROP, CROP), 2))
             for image in images]
    return torch.from_numpy(np.stack(small))[:, None].double() / 255


def hidden(w: dict, x: Tensor, probe: str) -> Tensor:
    """What the classifier sees, in evaluation."""
    z = body_in_evaluation({name.replace("f.", "body.", 1): v for name, v in w.items()}, x)
    if probe == "encoder":
        return z
    return product(bn(w, "g.1", z @ w["g.0.weight"].T).relu(), w, "g.3")


def fitted_rows(y: Tensor, ratio: float, seed: int) -> list[int]:
    """Of each class the first of the shuffled images: the share, rounded, at least one."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = []
    for c in set(y.tolist()):
        of_class = [i for i in order if y[i] == c]
        rows += of_class[:max(1, round(ratio * len(of_class)))]
    return sorted(rows)


def adam(z: Tensor, y: Tensor, classes: int, seed: int, lr: float, epochs: int, batch: int) -> tuple:
    """Weight and bias of a softmax regression by Adam, in float64."""
    generator, D = torch.Generator().manual_seed(seed), z.shape[1]
    start = [torch.empty(shape).uniform_(-D ** -0.5, D ** -0.5, generator=generator)
             for shape in ((classes, D), (classes,))]
    W = torch.cat([start[0], start[1][:, None]], 1).double()
    x = torch.cat([z.double(), torch.ones(len(z), 1).double()], 1)
    moments = {}
    for _ in range(epochs):
        for i in torch.randperm(len(z), generator=generator).split(batch):
            error = torch.softmax(x[i] @ W.T, 1) - torch.eye(classes)[y[i]]
            W = W - lr * adam_step(moments, "W", error.T @ x[i] / len(i))
    return W[:, :-1], W[:, -1]


def accuracies(z: Tensor, y: Tensor, seed: int, args) -> dict[str, float]:
    """{share: accuracy on the labels that are not fitted}."""
    found = {}
    for ratio in (0.12, 0.3):
        rows = fitted_rows(y, ratio, seed)
        rest = [i for i in range(len(y)) if i not in rows]
        W, b = adam(z[rows], y[rows], CLASSES, seed, args.linear_lr, args.linear_epochs, args.linear_batch)
        found[str(ratio)] = float(((z[rest] @ W.T + b).argmax(1) == y[rest]).double().mean())
    return found


def statistics_of(net: fedgala.Learner, batches: list[Tensor]) -> dict[str, Tensor]:
    """The plain mean over the batches of each BN's mean and variance in training, the weights at rest."""
    net = copy.deepcopy(net).train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # PyTorch's sign for the plain mean
    for x in batches:
        net.project(x.float())
    return {name: v.double() for name, v in net.state_dict().items() if "running" in name}


@pytest.mark.parametrize("probe", ["encoder", pytest.param("projector", marks=pytest.mark.slow)])
def test_a_run_by_hand(tmp_path, probe):
    """The accuracies of its last round and of the untrained network, to one image."""
    (tmp_path / "data.py").write_text(DATA)
    args = parsed("fedgala", "--dataset", tmp_path / "data.py", "--out", tmp_path / "run", *FLAGS,
                  "--probe", probe)
    (result,) = common.run(fedgala.Server, fedgala.Client, args, fedgala.build)
    domains = {d.name: d for d in common.open_dataset(args).domains}
    targets = {}
    for name in ("one", "two"):  # a target's images come in the order of its split
        order = shuffled(SIZES[name], 4, "split", name)
        targets[name] = shrunk(domains[name].images[order]), domains[name].labels[order]

    def expected(w: dict) -> dict:
        return {name: accuracies(hidden(w, x, probe), y, number(4, "linear", name), args)
                for name, (x, y) in targets.items()}

    def same(found: dict, by_hand: dict) -> bool:
        return all(abs(found[name][share] - by_hand[name][share]) * SIZES[name] < 1.6
                   for name in by_hand for share in by_hand[name])
    saved = saved_in(tmp_path / "run" / "checkpoint.pt")
    assert saved["images"] == 2 * 2 * (64 + 29)  # whole batches of all images of the sources, or the only one
    w = in_double(saved["server"]["w"])
    last = result["last"]["linear"]
    assert list(last) == ["one", "two"] and list(last["one"]) == ["0.12", "0.3"]
    assert same(last, expected(w))
    assert result["last"]["target"] == pytest.approx((last["one"]["0.12"] + last["two"]["0.12"]) / 2)
    assert [entry["round"] for entry in metrics(tmp_path / "run") if "linear" in entry] == [1, 2]

    common.seed_all(4, "init")
    net, of_clients = fedgala.build(args, 1, CLASSES), []
    w = in_double(net.state_dict())
    for k, name in enumerate(("dark", "bright")):
        order = shuffled(SIZES[name], 4, "split", name)
        order = [order[i] for i in shuffled(SIZES[name], 4, "batches", 0, k, 0)]
        # The last batch is left out if it is smaller, but not the only one.
        full = [order[i:i + 32] for i in range(0, len(order) - 31, 32)] or [order]
        of_clients.append(statistics_of(net, [shrunk(domains[name].images[i * 2]) for i in full]))
    start = result["start"]["linear"]
    by_images = {name: (70 * of_clients[0][name] + 29 * of_clients[1][name]) / 99 for name in of_clients[0]}
    assert same(start, expected(w | by_images)) and not same(start, expected(w))
    assert result["start"]["chance_loss"] == pytest.approx((math.log(2 * 32 - 1) + math.log(2 * 29 - 1)) / 2)


def test_fit_by_hand():
    """Weights after many steps of Adam, the last batch of each epoch smaller; and the classifier's seed."""
    torch.manual_seed(0)
    z, y = torch.randn(45, 6), torch.arange(45) % 4
    how = dict(lr=0.02, epochs=30, batch=10)
    layer = linear.fit_linear(z, y, 4, 9, **how)
    W, b = adam(z, y, 4, 9, **how)
    torch.testing.assert_close(layer.weight.double(), W, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.bias.double(), b, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(layer.weight, linear.fit_linear(z, y, 4, 8, **how).weight, atol=1e-2)


class Pixels(torch.nn.Module):
    """A fixed encoder, which remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def features(self, x: Tensor) -> Tensor:
        assert not self.training
        self.given.append(x)
        return x.flatten(1)


def fitted(*flags) -> tuple[dict, list[Tensor], Tensor]:
    """The accuracies on a target of 40 images of four classes, what the encoder was given, and the images."""
    args = parsed("fedgala", "--crop", 8, "--label-ratio", "0.2/0.3", "--linear-epochs", 6, "--linear-batch",
                  5, "--precision", "fp32", "--device", "cpu", *flags)
    images = torch.randint(0, 256, (40, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    target = common.Data(images.to(torch.uint8), torch.arange(40), torch.arange(40) % 4, "cpu", "unit")
    encoder = Pixels()
    client = SimpleNamespace(model=lambda down: encoder, data=SimpleNamespace(name="one", test=target))
    fed = SimpleNamespace(clients={0: client}, settings=args, dataset=common.Dataset([], tuple("abcd")))
    return common.fit_client(fed, 0, 1, {})[1], encoder.given, images.float() / 255


def test_the_classifier_is_fitted_to_views_and_tested_on_plain_images():
    """Without an augmentation views are the images. Else each labelled image has a new view in each epoch,
    and no other image has one."""
    plain, given, images = fitted("--linear-views", "plain", "--augment", "crops")
    torch.testing.assert_close(torch.cat(given), images)
    same, given, _ = fitted("--linear-views", "augmented", "--augment", "none")
    assert same == plain
    torch.testing.assert_close(given[0], images)
    _, given, _ = fitted("--linear-views", "augmented", "--augment", "crops")
    torch.testing.assert_close(given[0], images)  # those that are tested
    assert [len(x) for x in given[1:]] == [5, 3] * 6 + [5, 5, 2] * 6
    assert len(torch.cat(given[1:]).flatten(1).unique(dim=0)) > 100  # of so few pixels some crops are alike


def test_views_are_those_of_the_labelled_images():
    """Images of one grey each stay what they are in any crop."""
    args = parsed("fedgala", "--crop", 8, "--precision", "fp32", "--device", "cpu")
    grey = torch.arange(40, dtype=torch.uint8)[:, None, None, None].expand(40, 1, 12, 12)
    target = common.Data(grey, torch.arange(40).flip(0), torch.zeros(40, dtype=torch.long), "cpu", "unit")
    rows = torch.tensor([3, 0, 39])
    z, _ = common.representations(Pixels().eval(), target, args, rows)
    torch.testing.assert_close(z, ((39 - rows) / 255)[:, None].expand(3, 64))
