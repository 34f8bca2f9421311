"""fedgala.py and baselines/fedema.py against independent calculations, most of them in float64."""

import dataclasses

import common
import fedgala
from tests.conftest import PROGRAMS, metrics, parsed, run_here

import pytest
import torch
from torch import Tensor, tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

SMALL = ("--limit", "48", "--batch-size", "8", "--hidden", "16", "--dim", "8", "--precision", "fp32",
         "--target", "d75")
RUN = ("--image-size", 8, "--crop", 8, "--hidden", 16, "--dim", 8, "--linear-epochs", 5)


def federation(method: str, *flags, K=2):
    """(args, server, K clients, net) on a few digits."""
    module = PROGRAMS[method]
    args = parsed(method, *SMALL, *flags)
    dataset = common.open_dataset(args)
    members, _ = common.split(dataset, args)
    common.seed_all(args.seed, "init")
    net = module.build(args, 1, len(dataset.classes)).to(memory_format=torch.channels_last)
    server = module.Server(args, net, K)
    clients = [module.Client(args, net, k, members[k]) for k in range(K)]
    return args, server, clients, net


def unit(v: Tensor) -> Tensor:
    """The rows of v at length 1."""
    return v / v.norm(dim=1, keepdim=True)


def test_more_keys_than_the_queue_has_places():
    """The newest ten stay, around the end of the queue."""
    _, _, _, net = federation("fedgala", "--ssl", "moco", "--queue", "10")
    for count, position in ((4, 4), (23, 7)):
        net.train().loss(torch.rand(count, 1, 28, 28), torch.rand(count, 1, 28, 28))
        newest = normalize(net.keys[-10:])
        net.after_step()
        assert int(net.position) == position
    assert_close(net.queue.roll(-7, 0), newest)


def test_similarities_are_float32_under_autocast():
    """Bit for bit: the losses with and without autocast."""
    z, queue = torch.randn(6, 4), normalize(torch.randn(5, 4))

    def losses() -> list[Tensor]:
        return [fedgala.nt_xent(z, 0.1), fedgala.info_nce(z, z + 0.1, queue, 0.1)]

    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = losses()
    assert under_autocast == losses()


def test_unaligned_by_hand():
    """Cosines on paper, by tensor and by layer, of both signs."""
    gradient = {
        "a.weight": tensor([1.0, 0.0]),
        "a.bias": tensor([-3.0]),
        "b.weight": tensor([0.0, 2.0]),
        "c.weight": tensor([1.0]),
    }
    change = {
        "a.weight": tensor([2.0, 0.0]),
        "a.bias": tensor([1.0]),
        "b.weight": tensor([1.0, 1.0]),
        "c.weight": tensor([0.0]),
    }
    names = list(change)
    tensors = fedgala.layer_groups(names, "tensor")
    layers = fedgala.layer_groups(names, "layer")
    assert tensors == [["a.weight"], ["a.bias"], ["b.weight"], ["c.weight"]]
    assert layers == [["a.weight", "a.bias"], ["b.weight"], ["c.weight"]]

    def bad(groups, tau, sign) -> list[bool]:
        return fedgala.unaligned(gradient, change, groups, tau, sign).tolist()

    # Cosines: a.weight 1, a.bias -1, b 1/sqrt 2, c undefined (no change: kept); layer a
    # (2 - 3) / (sqrt 10 sqrt 5) = -0.141.
    assert bad(tensors, 0, "paper") == [False, True, False, False]
    assert bad(tensors, 0, "descent") == [True, False, True, False]
    assert bad(layers, 0, "paper") == [True, False, False]
    assert bad(layers, -0.2, "paper") == [False, False, False]
    assert bad(layers, 0.75, "paper") == [True, True, False]
    assert bad(layers, 0.1, "descent") == [False, True, False]
    across = {"a.weight": tensor([0.0, 1.0])}
    at_tau = fedgala.unaligned(across, {"a.weight": tensor([1.0, 0.0])}, [["a.weight"]], 0, "paper")
    assert at_tau.tolist() == [True]  # line 19 as printed keeps what is above tau alone


def aligned_weights(g: list[Tensor], p: Tensor, iterations: int) -> Tensor:
    """The weights [K] of clients with these updates: the mean of an entry that says which client it is of."""
    models = [{"x": g_i, "who": row} for g_i, row in zip(g, torch.eye(len(g)).double())]
    theta = {"x": torch.zeros_like(g[0]), "who": torch.zeros(len(g))}
    return fedgala.global_alignment(models, theta, ["x"], p, iterations)["who"]


def test_global_alignment_by_hand():
    """Weights of opposed, orthogonal, equal and unmoved clients, on paper."""
    def after_one(g: list[Tensor], *p: float):
        return pytest.approx(aligned_weights(g, tensor(p).double(), 1).tolist())

    opposed = [tensor([1.0, 0.0]), tensor([-1.0, 0.0])]  # the heavier one is the mean's direction
    assert [1, 0] == after_one(opposed, 0.7, 0.3)
    right_angle = [tensor([3.0, 0.0]), tensor([0.0, 4.0])]  # their mean is (1.5, 2): cosines 0.6 and 0.8
    assert [0.8 / 1.7, 0.9 / 1.7] == after_one(right_angle, 0.5, 0.5)
    same = [torch.ones(3), torch.ones(3)]
    assert [0.5, 0.5] == after_one(same, 0.9, 0.1)
    one_still = [torch.zeros(2), tensor([1.0, 0.0])]  # no update has no direction: cosine 0
    assert [1 / 3, 2 / 3] == after_one(one_still, 0.5, 0.5)


PLAIN = ("--variant", "paper", "--local-alignment", "off", "--no-global-alignment", "--predictor", "shared")


def seeded(args, client, t: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of a client in round t."""
    common.seed_all(args.seed, "train", t, 0)
    return list(common.batches(client.data.train, args, t, 0))


def test_views_differ_and_repeat():
    """Two draws of one seed are equal, the two views and other seeds are not."""
    args, _, (client, _), _ = federation("fedgala")
    first, again = seeded(args, client, 3), seeded(args, client, 3)
    for (x, _), (same, _) in zip(first, again):
        assert torch.equal(x, same)
    x, _ = first[0]
    assert x.shape == (16, 1, 28, 28)
    for view1, view2 in zip(*x.chunk(2)):
        assert not torch.equal(view1, view2)
    assert not torch.equal(x, seeded(args, client, 4)[0][0])
    whole = dataclasses.replace(args, augment="none", crop=28)
    x, y = seeded(whole, client, 3)[0]
    assert torch.equal(*x.chunk(2)) and len(y) == 8
    smaller = dataclasses.replace(args, augment="none", crop=14)
    x, _ = seeded(smaller, client, 3)[0]
    assert x.shape[2:] == (14, 14)


@pytest.mark.parametrize("ssl", ["moco", "byol", "simsiam"])
def test_chance_loss(ssl):
    """Of MoCo when all keys are alike, of BYOL and SimSiam at right angles."""
    args = parsed("fedgala", "--ssl", ssl, "--queue", "6")
    alike = torch.ones(4, 3)
    right, up = tensor([[1.0, 0.0]]), tensor([[0.0, 1.0]])
    at_chance = {
        "moco": fedgala.info_nce(alike, alike, unit(torch.ones(6, 3)), args.temperature),
        "byol": 2 * fedgala.regression(right, up),
        "simsiam": -fedgala.mean_cosine(right, up),
    }
    assert fedgala.chance_loss(args, 100) == pytest.approx(float(at_chance[ssl]), abs=1e-6)


def test_domains_that_are_neither_source_nor_target_are_left_out(tmp_path):
    one = run_here("fedgala", tmp_path, *RUN, "--sources", "d0,d15", "--target", "d60")
    assert list(one["last"]["linear"]) == ["d60"]
    assert list(metrics(tmp_path)[0]["clients"]) == ["d0", "d15"]


def test_fedema_without_mixing_is_fedbyol(tmp_path):
    flags = (*RUN, "--target", "d0", "--rounds", "2", "--eval-every", 2)
    a = run_here("baselines.fedema", tmp_path / "a", "--autoscale", "0", *flags)
    b = run_here("official.fedgala", tmp_path / "b", "--ssl", "byol", *PLAIN, *flags)
    for mine, theirs in zip(metrics(tmp_path / "a"), metrics(tmp_path / "b")):
        for name, log in mine["clients"].items():
            assert log["loss"] == theirs["clients"][name]["loss"]
    assert a["last"] == b["last"]
    assert a["logs"]["mu"] == [None, 0]
