"""FDSE: each equation against an independent calculation, the algorithms by what changes and what travels."""

import dataclasses
import itertools
import math
import sys

import common
import fdse
from tests.conftest import members_of, parsed, stops
from tests.three_clients import one_round

import pytest
import torch
from torch import tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode


SMALL = ("--scale", "smoke", "--precision", "fp32", "--device", "cpu")


def small_args(*flags):
    return parsed("fdse", *SMALL, *flags)


def federation(args, K=3, seed=0):
    """A server and K clients of the smallest network on digits, the network, and the data of all clients; of
    the method whose arguments these are."""
    method = sys.modules[type(args).__module__]
    dataset = common.open_dataset(args)
    data, _ = common.split(dataset, args)
    common.seed_all(seed)
    net = method.build(args, 1, len(dataset.classes))
    server = method.Server(args, net, K)
    clients = [method.Client(args, net, k, data[k]) for k in range(K)]
    return server, clients, net, data


def target_of(args):
    """The data of the domain that is left out."""
    return members_of(args)[1][0]


def alexnet(**kw):
    return fdse.build(fdse.Args(backbone="alexnet_bn", **kw), 3, 10)


def lodo_args(*flags):
    return small_args("--protocol", "lodo", "--target", "d75", *flags)


def numbers(net):
    """All weights and statistics, without BN's counters."""
    return sum(v.numel() for name, v in net.state_dict().items() if "num_batches" not in name)


def mib(net):
    return numbers(net) * 4 / 2 ** 20


def test_table4_sizes():
    """Table 4 says 24.87 MiB; within 0.1% of it."""
    assert numbers(alexnet()) == 6_517_610
    assert abs(mib(alexnet()) / 24.87 - 1) < 1e-3


def multiply_adds(net):
    """Of 50 images of 256x256, forward."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.eval()(torch.zeros(1, 3, 256, 256))
    return counter.get_total_flops() / 2 * 50


def test_table4_flops():
    """Table 4: 4.41e10 for AlexNet, 2.24e10 for FDSE, to 1.5%."""
    plain = multiply_adds(common.Net(common.alexnet_bn(3, 256), 1024, 10))
    ours = multiply_adds(alexnet())
    assert abs(plain / 4.41e10 - 1) < 0.015
    assert abs(ours / 2.24e10 - 1) < 0.015
    assert 0.49 < ours / plain < 0.52


@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (6, 3)])
def test_eq4_and_its_gradient(shape):
    """Against torch.var_mean; the gradient against finite differences, in float64."""
    torch.manual_seed(0)
    x = (3 * torch.randn(shape, dtype=torch.float64) + 1).requires_grad_()
    axes = [axis for axis in range(len(shape)) if axis != 1]
    exact = torch.var_mean(x, axes, correction=0)[::-1]
    torch.testing.assert_close(fdse.batch_statistics(x), exact, rtol=1e-6, atol=1e-7)
    assert torch.autograd.gradcheck(fdse.batch_statistics, x, atol=1e-6)


def test_eq4_in_bf16():
    """Of channels whose means are up to 5 deviations, and of one without any: values within 1e-5 of float64,
    the gradient within the stated 1%."""
    torch.manual_seed(0)
    x = torch.randn(50, 6, 9, 9) + torch.arange(6.0)[:, None, None]
    x[:, 1] = 2.5
    a = x.bfloat16().requires_grad_()
    b = a.detach().double().requires_grad_()
    ours, exact = fdse.batch_statistics(a), torch.var_mean(b, (0, 2, 3), correction=0)[::-1]
    for mean, variance in (ours, exact):
        loss = mean.square().sum() + 3 * (variance - 2).square().sum()
        loss.backward()
    for found, expected in zip(ours, exact):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert (a.grad.double() - b.grad).norm() / b.grad.norm() < 0.01


def test_eq5_eq6_eq7_by_hand():
    """Two layers, two batches; numbers small enough for a sheet of paper. gamma 0.5.

    First batch. Layer 1: mu_hat (1, 2), var_hat (2, 1): (1 + 4)/2 + (1.5 - 1)^2 = 2.75; layer 2: var_hat 4:
    (4 - 2)^2 = 4. Second batch. Layer 1: mu_hat (1.5, 3), var_hat (2.5, 1): (2.25 + 9)/2 + 0.75^2 = 6.1875;
    layer 2: var_hat 5: 9; weights 1/4 and 3/4.
    """
    glob = [(tensor([0.0, 0.0]), tensor([1.0, 1.0])), (tensor([1.0]), tensor([2.0]))]
    batch = [(tensor([2.0, 4.0]), tensor([3.0, 1.0])), (tensor([1.0]), tensor([6.0]))]
    loss, hat = fdse.consistency(batch, glob, None, beta=0.0, gamma=0.5)
    assert math.isclose(loss.item(), 0.5 * 2.75 + 0.5 * 4, rel_tol=1e-6)
    loss, hat = fdse.consistency(batch, glob, hat, beta=math.log(3), gamma=0.5)
    assert math.isclose(loss.item(), 0.25 * 6.1875 + 0.75 * 9, rel_tol=1e-6)
    torch.testing.assert_close(hat[0][0], tensor([1.5, 3.0]))


def nearest_to_zero(d):
    """u on the simplex of the shortest sum_k u_k d_k, from all subsets of the d_k: the smallest of the points
    that are nearest to 0 on the line or plane through a subset and lie between its vectors."""
    best = None
    for r in range(1, len(d) + 1):
        for subset in itertools.combinations(range(len(d)), r):
            D = d[list(subset)]
            inverse = torch.linalg.pinv(D @ D.T).sum(1)
            u = torch.zeros(len(d), dtype=d.dtype)
            u[list(subset)] = inverse / inverse.sum()
            if (u > -1e-9).all() and (best is None or (u @ d).norm() < (best @ d).norm()):
                best = u
    return best


def test_eq8_min_norm_against_brute_force():
    """Weights on the simplex whose norm is the least of all faces of the hull, in float64."""
    torch.manual_seed(0)
    for trial in range(40):
        N, P = 2 + trial % 4, 5 + trial % 5
        d = F.normalize(torch.randn(N, P, dtype=torch.float64) + trial % 3, dim=1)
        u = fdse.min_norm(d)
        assert (u >= 0).all()
        assert math.isclose(u.sum(), 1, rel_tol=1e-9)
        assert abs((u @ d).norm() - (nearest_to_zero(d) @ d).norm()) < 1e-9


def test_eq8_opposite_and_zero_updates():
    """Opposite directions give 0; an update of norm 0 counts in the mean norm alone."""
    opposite = tensor([[1.0, 0.0], [-2.0, 0.0]])
    assert fdse.consensus(opposite).norm() < 1e-6  # the hull holds 0: no movement
    assert (fdse.consensus(torch.zeros(3, 4)) == 0).all()
    one_moved = tensor([[0.0, 0.0], [0.0, 4.0]])
    torch.testing.assert_close(fdse.consensus(one_moved), tensor([0.0, 2.0]))
    tiny = tensor([[1e-300, 0.0], [0.0, 4.0]], dtype=torch.float64)  # its square is 0
    torch.testing.assert_close(fdse.consensus(tiny), tensor([0.0, 2.0], dtype=torch.float64))


def test_eq9_three_clients_by_hand():
    """Clients 1 and 2 are alike, client 3 is not: the attention is not symmetric, and its rows sum to 1."""
    V = tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    e = math.exp(1 / 0.5)
    alike = [e / (2 * e + 1), e / (2 * e + 1), 1 / (2 * e + 1)]
    alone = [1 / (e + 2), 1 / (e + 2), e / (e + 2)]
    want = tensor([alike, alike, alone])
    V_next, attention = fdse.personalize(V, 0.5)
    torch.testing.assert_close(V_next, want @ V)
    torch.testing.assert_close(attention, want.double())


def test_the_order_of_a_gpu_gives_the_convolution():
    """In both orders of h and the filters, as channels last is what a run has."""
    conv, h = common.GroupedConv2d(4, 4, 3, padding=1, groups=4), torch.randn(2, 4, 5, 5)
    for layout in (torch.contiguous_format, torch.channels_last):
        conv, h = conv.to(memory_format=layout), h.contiguous(memory_format=layout)
        assert torch.allclose(conv.in_nchw(h), conv(h), atol=1e-6)


@pytest.mark.parametrize("unit", ["layer", "tensor"])
def test_every_entry_has_one_fate(unit):
    """Against the names of the network's state: each is in one group, and in one layer."""
    net = alexnet()
    parts = fdse.Parts(net, unit, own_bias=True)
    names = parts.u + parts.v + parts.bn_dse + parts.bn_dfe
    assert sorted(names) == sorted(net.state_dict())
    assert in_layers(parts.u_layers) == sorted(parts.u)
    assert in_layers(parts.v_layers) == sorted(parts.v)
    if unit == "layer":  # 7 DFE modules and the head; 7 DSE modules
        assert len(parts.u_layers) == 8
        assert len(parts.v_layers) == 7
        module = ["bias", "bn_dse.weight", "bn_dse.bias", "dse.weight"]
        assert sorted(parts.v_layers["body.0"]) == sorted(f"body.0.{name}" for name in module)
    else:
        for layer, names in (parts.u_layers | parts.v_layers).items():
            assert names == [layer]


def in_layers(layers):
    return sorted(itertools.chain(*layers.values()))


STATISTICS = ["running_mean", "running_var", "num_batches_tracked"]
OF_A_BLOCK = {
    "u": ["dfe.weight", "dfe.bias", "bn_dfe.weight", "bn_dfe.bias"],
    "v": ["bn_dse.weight", "bn_dse.bias", "dse.weight", "bias"],
    "bn_dfe": [f"bn_dfe.{name}" for name in STATISTICS],
    "bn_dse": [f"bn_dse.{name}" for name in STATISTICS],
}


@pytest.mark.parametrize("lodo", [False, True])
def test_what_travels(lodo):
    """BN_DSE's statistics go up only if there is an unseen client, and down to it alone."""
    server, clients, *_ = federation(lodo_args() if lodo else small_args())
    parts = {"u", "v", "bn_dfe"}
    payloads = []
    for k, client in enumerate(clients):
        down = server.download(k)
        payloads += [(down, parts), (client.train(down, 0), parts | {"bn_dse"} if lodo else parts)]
    if lodo:
        payloads.append((server.download(99), parts | {"bn_dse"}))
    for payload, expected in payloads:
        assert set(payload) == expected
        for part, tensors in payload.items():
            want = {f"body.{i}.{name}" for i in (0, 2, 6) for name in OF_A_BLOCK[part]}
            if part == "u":
                want |= {"head.weight", "head.bias"}
            assert set(tensors) == want


def test_only_an_unseen_client_adapts():
    """One of a source domain that has not trained yet has its own BN_DSE statistics and keeps all else."""
    args = lodo_args()
    server, clients, net, _ = federation(args)
    down = server.download(5)
    start = down["u"] | down["v"] | down["bn_dfe"] | down["bn_dse"]
    target = target_of(args)
    assert target.unseen and not clients[0].data.unseen
    adapted = common.state(fdse.Client(args, net, 5, target).model(down))
    assert not torch.equal(adapted["body.0.dse.weight"], start["body.0.dse.weight"])
    seen = common.state(fdse.Client(args, net, 5, dataclasses.replace(target, unseen=False)).model(down))
    assert all(torch.equal(v, start[name]) for name, v in seen.items() if ".bn_dse." not in name)


def test_the_adaptation_that_diverges_says_so():
    """At a rate of 1e30 it stops with a line that names the flags."""
    args = small_args("--protocol", "lodo", "--target", "d75", "--adapt-lr", "1e30")
    server, clients, net, _ = federation(args)
    one_round(server, clients)
    client = fdse.Client(args, net, 5, target_of(args))
    stops("to d75 diverges: lower --adapt-lr or --adapt-epochs", client.model, server.download(5))
