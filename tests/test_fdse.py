"""FDSE: each equation against an independent calculation, the algorithms by what changes and what travels."""

import dataclasses
import itertools
import math
import sys

import common
import fdse
from plumbing.runfolder import copied
from tests.conftest import metrics, parsed, run_here

import pytest
import torch
from torch import tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode


def small_args(*flags):
    return parsed("fdse", "--scale", "smoke", "--precision", "fp32", "--device", "cpu", *flags)


def federation(args, K=3, seed=0):
    """A server and K clients of the smallest network on digits, the network, and the data of all clients; of
    the method whose arguments these are."""
    method = sys.modules[type(args).__module__]
    domains, classes = common.load_domains(args)
    data, _ = common.split(common.Dataset(domains, classes), args)
    common.seed_all(seed)
    net = method.build(args, 1, len(classes))
    server = method.Server(args, net, K)
    clients = [method.Client(args, net, k, data[k]) for k in range(K)]
    return server, clients, net, data


def one_round(server, clients, t=0):
    """The uploads of all clients in round t, which the server has taken in."""
    uploads = {k: client.train(server.download(k), t) for k, client in enumerate(clients)}
    server.update(uploads, t)
    return uploads


def target_of(args):
    """The data of the domain that is left out."""
    return common.split(common.open_dataset(args), args)[1][0]


def alexnet(**kw):
    return fdse.build(fdse.Args(backbone="alexnet_bn", **kw), 3, 10)


def lodo_args(*flags):
    return small_args("--protocol", "lodo", "--target", "d75", *flags)


def blocks_of(net):
    return [module for module in net.modules() if isinstance(module, fdse.DSEBlock)]


def numbers(net):
    """All weights and statistics, without BN's counters."""
    return sum(v.numel() for name, v in net.state_dict().items() if "num_batches" not in name)


def mib(net):
    return numbers(net) * 4 / 2 ** 20


# Eqs. (2)-(3), Tables A5-A7, Table 4


@pytest.mark.parametrize("block_bias", [False, True])
def test_eq2_eq3_channel_by_channel(block_bias):
    """Each DFE channel alone through BN, ReLU and its own 3x3 filter; the identity half first (Table A7).
    With --block-bias the DSE filters have no bias, and each of the 8 channels has one before BN_DFE."""
    torch.manual_seed(0)
    block = fdse.DSEBlock(fdse.Args(block_bias=block_bias), 3, 8, 5, 2, 2).eval()
    for bn in (block.bn_dse, block.bn_dfe):
        bn.running_mean.normal_()
        bn.running_var.uniform_(0.5, 2)
        bn.weight.data.normal_()
        bn.bias.data.normal_()

    def norm(v, bn, i):
        deviation = (bn.running_var[i] + 1e-5).sqrt()
        unit = (v - bn.running_mean[i]) / deviation
        return unit * bn.weight[i] + bn.bias[i]

    x = torch.randn(2, 3, 11, 11)
    x_dfe = F.conv2d(x, block.dfe.weight, block.dfe.bias, stride=2, padding=2)
    channels = []
    for i in range(4):
        channels.append(F.relu(norm(x_dfe[:, i:i + 1], block.bn_dse, i)))
    bias = torch.zeros(4)
    if not block_bias:
        bias = block.dse.bias
    for i in range(4):
        own = block.dse.weight[i:i + 1]
        channels.append(F.conv2d(channels[i], own, bias[i:i + 1], padding=1))
    if block_bias:
        block.bias.data.normal_()
        channels = [c + b for c, b in zip(channels, block.bias)]
    want = torch.cat([F.relu(norm(c, block.bn_dfe, i)) for i, c in enumerate(channels)], 1)
    torch.testing.assert_close(block(x), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_bias", [False, True])
def test_linear_block_is_the_1x1_convolution_block(block_bias):
    """Against a convolution block with the same weights on a map of 1x1."""
    torch.manual_seed(0)
    args = fdse.Args(block_bias=block_bias)
    line = fdse.DSEBlock(args, 6, 8).eval()
    conv = fdse.DSEBlock(args, 6, 8, 1, 1, 0, dw=1).eval()
    if block_bias:
        line.bias.data.normal_()
    for name, v in conv.state_dict().items():
        v.copy_(line.state_dict()[name].view(v.shape))
    x = torch.randn(5, 6)
    as_map = x[..., None, None]
    torch.testing.assert_close(line(x), conv(as_map)[..., 0, 0])


def test_linear_block_takes_tokens():
    """Against the block on each image's tokens by themselves."""
    torch.manual_seed(0)
    block = fdse.DSEBlock(fdse.Args(), 6, 8).eval()
    x = torch.randn(2, 3, 6)
    want = [block(tokens) for tokens in x]
    torch.testing.assert_close(block(x), torch.stack(want))


def test_odd_channel_counts():
    """The shape: 7 channels of 4 with G = 2."""
    block = fdse.DSEBlock(fdse.Args(), 4, 7, 3, 1, 1)
    assert block(torch.randn(2, 4, 5, 5)).shape == (2, 7, 5, 5)


def test_table_a6_shapes():
    """Against the shapes of Table A6, layer by layer."""
    net = alexnet().eval()
    x = torch.randn(1, 3, 224, 224)
    shapes = []
    for layer in net.body:
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(64, 55, 55), (64, 27, 27), (192, 27, 27), (192, 13, 13), (384, 13, 13), (256, 13, 13),
                      (256, 13, 13), (256, 6, 6), (256, 6, 6), (9216,), (1024,), (1024,)]


def test_table4_sizes():
    """Table 4 says 24.87 MiB; within 0.1% of it."""
    assert numbers(alexnet()) == 6_516_010
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


@pytest.mark.parametrize("name,size,count", [
    ("resnet18", 32, 8),
    ("resnet50", 32, 16),
    ("resnet18_3x3", 16, 8),
    ("vit_b8", 16, 12),
])
def test_blocks_in_other_networks(name, size, count):
    """Sec. A8.1: one block for each residual block or feed-forward layer; all of it is trained."""
    args = fdse.Args(backbone=name, image_size=size)
    net = fdse.build(args, 3, 7)
    blocks = blocks_of(net)
    assert len(blocks) == count
    z = net.features(torch.randn(3, 3, size, size))
    batch = [b.statistics for b in blocks]
    glob = [(b.bn_dfe.running_mean, b.bn_dfe.running_var) for b in blocks]
    l_con, _ = fdse.consistency(batch, glob, None, 0.001)
    loss = net.classify(z).logsumexp(1).sum() + l_con
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())
    assert len(fdse.Parts(net, "layer").v_layers) == count


# Eqs. (4)-(7)


@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (6, 3)])
def test_eq4_and_its_gradient(shape):
    """Against plain means of flattened maps; the gradient against finite differences in float64
    (gradcheck)."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    x = (3 * x + 1).requires_grad_()
    mean, variance = fdse.BatchStatistics.apply(x)
    flat = x.transpose(0, 1).reshape(3, -1)
    torch.testing.assert_close(mean, flat.mean(1))
    centered = flat - flat.mean(1, keepdim=True)
    want = (centered ** 2).mean(1)
    torch.testing.assert_close(variance, want, rtol=1e-6, atol=1e-7)
    assert torch.autograd.gradcheck(fdse.BatchStatistics.apply, x, atol=1e-6)


def test_eq4_in_bf16_and_of_a_dead_channel():
    """Against torch.var_mean in float64, to 1e-5."""
    x = torch.randn(40, 3, 6, 6)
    x[:, 1] = 2.5
    x = x.bfloat16()
    want_var, want = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    mean, variance = fdse.BatchStatistics.apply(x.requires_grad_())
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(variance.double(), want_var, atol=1e-5, rtol=1e-5)


def test_eq4_gradient_in_bf16():
    """Within the stated 1% of float64 autograd, for means of up to 5 deviations."""
    torch.manual_seed(0)
    means = torch.arange(6.0)[:, None, None]
    x = (torch.randn(50, 6, 9, 9) + means).bfloat16()
    a = x.clone().requires_grad_()
    b = x.double().requires_grad_()
    ours = fdse.BatchStatistics.apply(a)
    exact = torch.var_mean(b, (0, 2, 3), correction=0)[::-1]
    for mean, variance in (ours, exact):
        loss = mean.square().sum() + 3 * (variance - 2).square().sum()
        loss.backward()
    error = a.grad.double() - b.grad
    assert error.norm() / b.grad.norm() < 0.01


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


def test_eq5_gradient_goes_through_the_current_batch_only():
    """Against 2 mu_hat (1 - gamma), on paper."""
    mu = tensor([1.0], requires_grad=True)
    var = tensor([1.0])
    glob = [(tensor([0.0]), tensor([1.0]))]
    _, hat = fdse.consistency([(mu, var)], glob, None, 0.0)
    assert not hat[0][0].requires_grad
    loss, _ = fdse.consistency([(mu, var)], glob, hat, 0.0)
    loss.backward()
    mu_hat = 0.9 * 0.1 + 0.1
    assert math.isclose(mu.grad.item(), 2 * mu_hat * 0.1, rel_tol=1e-5)  # 2 mu_hat (1 - gamma)


def test_eq7_weights_of_seven_layers():
    """beta 0.001 runs from 0.1424 to 0.1433: uniform in practice."""
    w = fdse.depth_weights(7, 0.001)
    assert math.isclose(sum(w), 1)
    assert round(w[0], 4) == 0.1424
    assert round(w[-1], 4) == 0.1433
    for a, b in itertools.pairwise(w):
        assert math.isclose(b / a, math.exp(0.001))


# Eqs. (8)-(9)


def least_norm(G):
    """The smallest u'Gu over the simplex, by every active set: on each subset of the vectors the minimizer
    with sum 1 solves a linear system; the best of those without negative weights."""
    N, best = len(G), math.inf
    subsets = itertools.chain.from_iterable(itertools.combinations(range(N), r) for r in range(1, N + 1))
    for S in subsets:
        r = len(S)
        of_subset = G[list(S)][:, list(S)]
        kkt = torch.ones(r + 1, r + 1, dtype=torch.float64)
        kkt[:r, :r] = of_subset
        kkt[r, r] = 0
        rhs = torch.zeros(r + 1, 1, dtype=torch.float64)
        rhs[r] = 1
        u = torch.linalg.lstsq(kkt, rhs, driver="gelsd").solution[:r, 0]
        if (u > -1e-9).all() and abs(u.sum() - 1) < 1e-6:
            best = min(best, float(u @ of_subset @ u))
    return best


def test_eq8_min_norm_against_brute_force():
    """Weights on the simplex whose norm is the least of all faces of the hull, in float64."""
    torch.manual_seed(0)
    for trial in range(40):
        N, P = 2 + trial % 4, 3 + trial % 5
        vectors = torch.randn(N, P, dtype=torch.float64) + trial % 3
        d = F.normalize(vectors, dim=1)
        G = d @ d.T
        u = fdse.min_norm(G)
        assert (u >= 0).all()
        assert math.isclose(u.sum(), 1, rel_tol=1e-9)
        assert abs(float(u @ G @ u) - least_norm(G)) < 1e-9


def test_eq8_two_clients_by_hand():
    """Updates (3, 0) and (0, 4): unit vectors e1, e2, min-norm point (1/2, 1/2), mean norm 3.5."""
    delta = tensor([[3.0, 0.0], [0.0, 4.0]])
    torch.testing.assert_close(fdse.consensus(delta), tensor([1.75, 1.75]))


def test_eq8_no_client_is_harmed():
    """The printed guarantee: the aggregated update has no negative product with any client's."""
    torch.manual_seed(1)
    for _ in range(20):
        delta = torch.randn(5, 40) + 0.3
        assert (delta @ fdse.consensus(delta) >= -1e-4).all()


def test_eq8_opposite_and_zero_updates():
    """Opposite directions give 0; an update of norm 0 counts in the mean norm alone."""
    opposite = tensor([[1.0, 0.0], [-2.0, 0.0]])
    assert fdse.consensus(opposite).norm() < 1e-6  # the hull holds 0: no movement
    assert (fdse.consensus(torch.zeros(3, 4)) == 0).all()
    one_moved = tensor([[0.0, 0.0], [0.0, 4.0]])
    torch.testing.assert_close(fdse.consensus(one_moved), tensor([0.0, 2.0]))


def test_eq9_two_clients_by_hand():
    """Cosine 0 and tau 0.5: softmax of (2, 0)."""
    V = tensor([[2.0, 0.0], [0.0, 3.0]])
    a = math.exp(2) / (math.exp(2) + 1)
    b = 1 - a
    want = tensor([[2 * a, 3 * b], [2 * b, 3 * a]])
    torch.testing.assert_close(fdse.personalize(V, 0.5), want)


def test_eq9_three_clients_by_hand():
    """Clients 1 and 2 are alike, client 3 is not: the attention is not symmetric, and its rows sum to 1."""
    V = tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    e = math.exp(1 / 0.5)
    alike = [e / (2 * e + 1), e / (2 * e + 1), 1 / (2 * e + 1)]
    alone = [1 / (e + 2), 1 / (e + 2), e / (e + 2)]
    want = tensor([alike, alike, alone]) @ V
    torch.testing.assert_close(fdse.personalize(V, 0.5), want)


def test_eq9_limits_of_tau():
    """tau 1e-4: each client its own row; 1e6: the plain mean."""
    V = torch.randn(4, 10)
    torch.testing.assert_close(fdse.personalize(V, 1e-4), V)
    mean = V.mean(0).expand(4, 10)
    torch.testing.assert_close(fdse.personalize(V, 1e6), mean, atol=1e-5, rtol=1e-4)


# Who keeps and sends what; Algorithms 1 and 3


@pytest.mark.parametrize("unit", ["layer", "tensor"])
def test_every_entry_has_one_fate(unit):
    """Against the names of the network's state: each is in one group, and in one layer."""
    net = alexnet()
    parts = fdse.Parts(net, unit)
    names = parts.u + parts.v + parts.bn_dse + parts.bn_dfe
    assert sorted(names) == sorted(net.state_dict())
    assert in_layers(parts.u_layers) == sorted(parts.u)
    assert in_layers(parts.v_layers) == sorted(parts.v)
    if unit == "layer":  # 7 DFE modules and the head; 7 DSE modules
        assert len(parts.u_layers) == 8
        assert len(parts.v_layers) == 7
        module = ["bn_dse.weight", "bn_dse.bias", "dse.weight", "dse.bias"]
        assert parts.v_layers["body.0"] == [f"body.0.{name}" for name in module]
    else:
        for layer, names in (parts.u_layers | parts.v_layers).items():
            assert names == [layer]


def in_layers(layers):
    return sorted(itertools.chain(*layers.values()))


STATISTICS = ["running_mean", "running_var", "num_batches_tracked"]
OF_A_BLOCK = {
    "u": ["dfe.weight", "dfe.bias", "bn_dfe.weight", "bn_dfe.bias"],
    "v": ["bn_dse.weight", "bn_dse.bias", "dse.weight", "dse.bias"],
    "bn_dfe": [f"bn_dfe.{name}" for name in STATISTICS],
    "bn_dse": [f"bn_dse.{name}" for name in STATISTICS],
}
# Bytes of the digits' network with its blocks 1 -> 32, 32 -> 64 (3x3) and 3136 -> 64, and 10 classes. The DFE
# makes half of a block's channels; a BN has two weights and two statistics a channel, and a counter (int64).
BYTES = {
    "u": 4 * (1 * 9 * 16 + 16 + 2 * 32
              + 32 * 9 * 32 + 32 + 2 * 64
              + 3136 * 32 + 32 + 2 * 64
              + 64 * 10 + 10),
    "v": 4 * (2 * 16 + 9 * 16 + 16
              + 2 * 32 + 9 * 32 + 32
              + 2 * 32 + 1 * 32 + 32),
    "bn_dfe": 4 * 2 * (32 + 64 + 64) + 3 * 8,
    "bn_dse": 4 * 2 * (16 + 32 + 32) + 3 * 8,
}


@pytest.mark.parametrize("lodo", [False, True])
def test_what_travels_by_name_and_by_byte(lodo):
    """BN_DSE's statistics go up only if there is an unseen client, and down to it alone."""
    server, clients, *_ = federation(lodo_args() if lodo else small_args())
    without = [server.download(k) for k in range(3)]
    ups = [client.train(down, 0) for client, down in zip(clients, without)]
    whole = []
    if lodo:
        whole = [*ups, server.download(99)]  # an unseen client receives what a client sends
    else:
        without += ups
    for payload in without:
        assert set(payload) == {"u", "v", "bn_dfe"}
        assert common.nbytes(payload) == BYTES["u"] + BYTES["v"] + BYTES["bn_dfe"] == 447_168
    for payload in whole:
        assert set(payload) == {"u", "v", "bn_dfe", "bn_dse"}
        assert common.nbytes(payload) == sum(BYTES.values()) == 447_832
    for payload in (*without, *whole):
        for part, tensors in payload.items():
            want = {f"body.{i}.{name}" for i in (0, 2, 6) for name in OF_A_BLOCK[part]}
            if part == "u":
                want |= {"head.weight", "head.bias"}
            assert set(tensors) == want
            assert common.nbytes(tensors) == BYTES[part]


def test_what_moves():
    """After a round: each tensor against its start, plain means, and Eq. (8) of one layer."""
    args = lodo_args()
    server, clients, *_ = federation(args)
    before = copied(common.kept(server))
    down = server.download(0)
    uploads = one_round(server, clients)
    for part in ("u", "v"):  # every trainable tensor, but for a bias before BN, which only rounding moves
        for name, value in uploads[0][part].items():
            if not name.endswith((".dfe.bias", ".dse.bias")):
                assert not torch.equal(value, down[part][name]), name
    unseen = server.download(99)
    for part, now in (("bn_dfe", server.bn_dfe), ("bn_dse", unseen["bn_dse"])):
        assert_plain_means(now, [up[part] for up in uploads.values()])
    assert_plain_means(unseen["v"], list(server.v.values()))
    names = server.parts.u_layers["body.0"]
    old = vector(before["u"], names)
    delta = torch.stack([vector(up["u"], names) for up in uploads.values()]) - old
    torch.testing.assert_close(vector(server.u, names), old + fdse.consensus(delta))


def vector(tensors, names):
    return common.flatten([tensors[name] for name in names])


def assert_plain_means(now, states):
    for name, value in now.items():
        mean = torch.stack([tensors[name] for tensors in states]).double().mean(0)
        if "num_batches" in name:
            mean = mean.round()
        torch.testing.assert_close(value.double(), mean)


@pytest.mark.parametrize("unit", ["layer", "tensor"])
def test_the_unit_of_aggregation(unit):
    """A module has one consensus and one similarity; with --unit tensor each tensor has its own."""
    server, clients, *_ = federation(small_args("--unit", unit, "--tau", "0.01"))
    before = copied(common.kept(server))
    uploads = one_round(server, clients)
    for part in ("u", "v"):
        module = [f"body.2.{name}" for name in OF_A_BLOCK[part]]
        units = [module] if unit == "layer" else [[name] for name in module]
        for names in units:
            theta = torch.stack([vector(up[part], names) for up in uploads.values()])
            if part == "u":
                old = vector(before["u"], names)
                want, now = old + fdse.consensus(theta - old), server.u
            else:
                want, now = fdse.personalize(theta, 0.01)[1], server.v[1]
            torch.testing.assert_close(vector(now, names), want)


def test_own_statistics_stay_with_the_client():
    """Bit for bit: BN_DSE's are those of the client's last upload, BN_DFE's the server's."""
    args = lodo_args()
    server, clients, *_ = federation(args)
    uploads = one_round(server, clients)
    for k, client in enumerate(clients):
        held = client.model(server.download(k)).state_dict()
        for name in server.parts.bn_dse:
            assert torch.equal(held[name], uploads[k]["bn_dse"][name])
        for name in server.parts.bn_dfe:
            assert torch.equal(held[name], server.bn_dfe[name])


def test_switches_off_leave_fedavg_with_local_bn_dse():
    """lambda 0, without A and B: plain uniform averaging, but for the DSE modules, which stay local."""
    args = small_args("--lambda", 0, "--no-consensus", "--no-similarity", "--adapt-epochs", 0)
    server, clients, _, data = federation(args)
    common.seed_all(0)
    twin = fdse.build(args, 1, 10)
    shared = common.state(twin)
    local = [name for name in shared if ".bn_dse." in name or ".dse." in name]
    own = [common.pick(shared, local) for _ in clients]
    for t in range(2):
        uploads, states = {}, []
        for k, client in enumerate(clients):
            common.seed_all(7, t, k)
            uploads[k] = client.train(server.download(k), t)
            common.seed_all(7, t, k)
            states.append(trained_by_hand(twin, shared | own[k], data[k].train, args, t, k))
            own[k] = common.pick(states[-1], local)
        server.update(uploads, t)
        for name, value in shared.items():
            if value.is_floating_point():
                shared[name] = sum(state[name] for state in states) / 3
    for k, client in enumerate(clients):
        held = client.model(server.download(k)).state_dict()
        want = shared | own[k]
        for name, value in held.items():
            if "num_batches" not in name:
                torch.testing.assert_close(value, want[name], atol=1e-4, rtol=1e-4)


def trained_by_hand(net, start, part, args, t, k):
    """The state after local training with plain SGD steps."""
    net.load_state_dict(start)
    net.train()
    for x, y in common.batches(part, args, t, k):
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= args.lr * p.grad
    return common.state(net)


def test_lambda_zero_has_no_consistency_and_lambda_moves_the_weights():
    """The same training with lambda 0 and 1, and with --con-from 1."""
    args = small_args()
    ups = []
    for lambda_ in (0.0, 1.0):
        server, clients, *_ = federation(dataclasses.replace(args, lambda_=lambda_))
        ups.append(clients[0].train(server.download(0), 0))
        assert ("consistency" in clients[0].log) == (lambda_ > 0)
    without, with_it = [up["u"]["body.0.dfe.weight"] for up in ups]
    assert not torch.equal(without, with_it)
    server, clients, *_ = federation(dataclasses.replace(args, con_from=1))
    clients[0].train(server.download(0), 0)
    assert "consistency" not in clients[0].log
    clients[0].train(server.download(0), 1)
    assert "consistency" in clients[0].log


def l_con_of(net, start, x, beta):
    """L_Con of one batch x of a network, against the global statistics in `start`."""
    net.train()
    net.features(x)
    glob = []
    for name in ("body.0.bn_dfe", "body.2.bn_dfe", "body.6.bn_dfe"):
        glob.append((start[name + ".running_mean"], start[name + ".running_var"]))
    batch = [b.statistics for b in blocks_of(net)]
    loss, _ = fdse.consistency(batch, glob, None, beta)
    return loss.item()


def test_algorithm3_changes_dse_only_lowers_l_con_and_needs_no_labels():
    """Which entries move, and L_Con before, with new statistics alone, and after the steps."""
    args = small_args("--protocol", "lodo", "--target", "d75", "--limit", "60")
    server, clients, net, _ = federation(args)
    target = target_of(args)  # its 60 images are four batches
    for t in range(2):
        one_round(server, clients, t)
    down = server.download(5)
    start = down["u"] | down["v"] | down["bn_dfe"] | down["bn_dse"]

    def adapted_with(**changes):
        client = fdse.Client(dataclasses.replace(args, **changes), net, 5, target)
        return common.state(client.model(down))

    adapted = adapted_with()
    changed = {name for name in adapted if not torch.equal(adapted[name], start[name])}
    assert all(".dse." in name or ".bn_dse." in name for name in changed)
    assert {"body.0.dse.weight", "body.0.bn_dse.weight", "body.0.bn_dse.running_mean"} <= changed

    x, _ = target.test.batch(torch.arange(len(target.test)))
    values = []
    for tensors in (start, adapted_with(adapt_lr=1e-12), adapted):  # the second one: its statistics alone
        values.append(l_con_of(common.load(net, tensors), start, x, args.beta))
    assert values[2] < values[0] and values[2] < values[1]  # the gradient does its part
    target.test.labels = torch.zeros_like(target.test.labels)
    again = adapted_with()
    assert all(torch.equal(again[name], adapted[name]) for name in adapted)
    still = adapted_with(adapt_epochs=0)
    assert all(torch.equal(value, start[name]) for name, value in still.items())


def test_an_unseen_client_is_known_by_its_data():
    """Only the client of a domain that is left out takes BN_DSE statistics from the server, and adapts."""
    args = small_args("--protocol", "lodo", "--target", "d75")
    server, clients, net, _ = federation(args)
    target = target_of(args)
    one_round(server, clients)
    down = server.download(5)
    assert target.unseen and not clients[0].data.unseen
    held = common.state(fdse.Client(args, net, 5, target).model(down))
    assert not torch.equal(held["body.0.dse.weight"], down["v"]["body.0.dse.weight"])
    seen = dataclasses.replace(target, unseen=False)  # as a client that has not been sampled yet
    late = fdse.Client(args, net, 5, seen)
    held = common.state(late.model(down))
    assert torch.equal(held["body.0.dse.weight"], down["v"]["body.0.dse.weight"])
    assert late.initial
    for name, value in late.initial.items():
        assert torch.equal(held[name], value)


def test_the_adaptation_that_diverges_says_so():
    """At a rate of 1e30 it stops with a line that names the flags."""
    args = small_args("--protocol", "lodo", "--target", "d75", "--adapt-lr", "1e30")
    server, clients, net, _ = federation(args)
    one_round(server, clients)
    client = fdse.Client(args, net, 5, target_of(args))
    with pytest.raises(common.Stop, match="adaptation to d75 diverges: lower --adapt-lr or --adapt-epochs"):
        client.model(server.download(5))


def test_an_unseen_client_gets_the_means_over_all_clients_also_of_those_not_sampled():
    """Against a sum of two uploads and the start of the third, divided by three."""
    args = lodo_args()
    server, clients, *_ = federation(args)
    ups = []
    for k in (0, 1):
        ups.append(clients[k].train(server.download(k), k))
        server.update({k: ups[k]}, k)
    name = server.parts.bn_dse[0]
    assert name.endswith("running_mean")  # of client 2 it is still 0
    want = (ups[0]["bn_dse"][name] + ups[1]["bn_dse"][name]) / 3
    torch.testing.assert_close(server.download(9)["bn_dse"][name], want)


# Runs with its own choices


@pytest.mark.parametrize("evaluated", ["aggregated", "trained"])
def test_the_model_that_is_tested(evaluated):
    args = small_args("--evaluated", evaluated)
    server, clients, *_ = federation(args)
    uploads = one_round(server, clients)
    name = "body.0.dfe.weight"
    aggregated, trained = server.u[name], uploads[1]["u"][name]
    assert not torch.equal(aggregated, trained)
    held = clients[1].model(server.download(1)).state_dict()
    if evaluated == "trained":
        assert torch.equal(held[name], trained)
    else:
        assert torch.equal(held[name], aggregated)


@pytest.mark.parametrize("evaluated", ["aggregated", "trained"])
def test_the_states_make_the_same_server_and_clients(evaluated):
    """What a checkpoint holds is all that a server and a client keep, whatever the scratch network holds."""
    args = small_args("--evaluated", evaluated)
    server, clients, *_ = federation(args)
    one_round(server, clients)
    other, others, *_ = federation(args, seed=1)
    common.restore(other, copied(common.kept(server)), "cpu")
    for k, client in enumerate(clients):
        common.restore(others[k], copied(common.kept(client)), "cpu")
        held = common.state(client.model(server.download(k)))
        again = others[k].model(other.download(k)).state_dict()
        assert all(torch.equal(again[name], held[name]) for name in held)
    assert all(torch.equal(other.download(9)[part][name], value)
               for part, tensors in server.download(9).items() for name, value in tensors.items())


@pytest.mark.parametrize("flags,clients", [
    (("--evaluated", "trained"), 6),
    (("--unit", "tensor"), 6),
    (("--protocol", "lodo", "--target", "d30"), 5),
    (("--participation", "0.5"), 3),
    (("--clients-per-domain", "2", "--dirichlet", "5"), 12),
    (("--precision", "bf16"), 6),
])
def test_fdse_runs_with_its_choices(tmp_path, flags, clients):
    """Each client of a round logs L_Con."""
    result = run_here("fdse", tmp_path / "run", *flags)
    assert result["last"]["round"] == 2
    assert ("target" in result["best"]) == ("lodo" in flags)
    for entry in metrics(tmp_path / "run"):
        logs = list(entry["clients"].values())
        assert len(logs) == clients
        assert all("consistency" in log for log in logs)


@pytest.mark.parametrize("scale", ["paper", "laptop", "smoke"])
def test_networks_take_the_images_of_every_scale(scale):
    """Shape of the logits, and that they are finite."""
    args = parsed("fdse", "--dataset", "officecaltech", "--scale", scale)
    net = fdse.build(args, 3, 10).eval()
    logits = net(torch.zeros(1, 3, args.image_size, args.image_size))
    assert logits.shape == (1, 10)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name,weights,channels", [
    ("alexnet", "none", 3),
    ("smallcnn", "none", 1),
    ("alexnet_bn", "none", 1),
    ("alexnet_bn", "imagenet", 3),
    ("smallcnn_bn", "imagenet", 3),
])
def test_networks_that_have_no_blocks(name, weights, channels):
    args = fdse.Args(backbone=name, weights=weights)
    with pytest.raises(common.Stop, match=f"fdse builds .* not --backbone {name} --weights {weights}"):
        fdse.build(args, channels, 10)


def test_settings_of_sec_5_1():
    paper = parsed("fdse", "--dataset", "officecaltech10")
    assert (paper.rounds, paper.batch_size, paper.epochs) == (500, 50, 1)
    assert (paper.lr_decay, paper.clip) == (0.998, 10)
    assert parsed("fdse", "--dataset", "pacs").epochs == 5
    assert parsed("fdse", "--dataset", "domainnet10").epochs == 5
