"""FDSE: every equation against an independent calculation, the algorithms by what changes and what travels."""

import dataclasses
import itertools
import math

import common
import fdse
from tests.conftest import metrics, parsed, run_here

import networks
import pytest
import torch
from torch import tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

torch.set_default_dtype(torch.float32)


def small_args(*flags):
    return parsed("fdse", "--scale", "smoke", "--precision", "fp32", "--device", "cpu", *flags)


def federation(args, K=3, seed=0):
    """A server and K clients of the smallest network on digits."""
    domains, classes = common.load_domains(args)
    clients, _ = common.make_clients(args, domains, len(classes))
    common.seed_all(seed)
    net = fdse.build(args, 1, len(classes))
    server = fdse.Server(args, net, K)
    return server, [fdse.Client(args, net, k, c) for k, c in enumerate(clients[:K])], net, clients


def alexnet(**kw):
    return fdse.build(fdse.Args(backbone="alexnet_bn", **kw), 3, 10)


def mib(net):
    return sum(v.numel() for n, v in net.state_dict().items() if "num_batches" not in n) * 4 / 2 ** 20


# Eqs. (2)-(3), Tables A5-A7, Table 4


def test_eq2_eq3_channel_by_channel():
    """Each DFE channel alone through BN, ReLU and its own 3x3 filter; the identity half first (Table A7)."""
    torch.manual_seed(0)
    block = fdse.DSEBlock(fdse.Args(), 3, 8, 5, 2, 2).eval()
    for bn in (block.bn_dse, block.bn_dfe):
        bn.running_mean.normal_(), bn.running_var.uniform_(0.5, 2), bn.weight.data.normal_(), bn.bias.data.normal_()
    x = torch.randn(2, 3, 11, 11)
    x_dfe = F.conv2d(x, block.dfe.weight, block.dfe.bias, stride=2, padding=2)
    norm = lambda v, bn, i: (v - bn.running_mean[i]) / (bn.running_var[i] + 1e-5).sqrt() * bn.weight[i] + bn.bias[i]
    channels = [F.relu(norm(x_dfe[:, i:i + 1], block.bn_dse, i)) for i in range(4)]
    channels += [F.conv2d(channels[i], block.dse.weight[i:i + 1], block.dse.bias[i:i + 1], padding=1) for i in range(4)]
    want = torch.cat([F.relu(norm(c, block.bn_dfe, i)) for i, c in enumerate(channels)], 1)
    torch.testing.assert_close(block(x), want, atol=1e-5, rtol=1e-5)


def test_linear_block_is_the_1x1_convolution_block():
    torch.manual_seed(0)
    line, conv = fdse.DSEBlock(fdse.Args(), 6, 8), fdse.DSEBlock(fdse.Args(), 6, 8, 1, 1, 0, dw=1)
    conv.load_state_dict({k: v.view(conv.state_dict()[k].shape) for k, v in line.state_dict().items()})
    x = torch.randn(5, 6)
    torch.testing.assert_close(line(x), conv(x[..., None, None])[..., 0, 0])
    tokens = fdse.DSEBlock(fdse.Args(), 6, 8).eval()
    y = torch.randn(2, 3, 6)
    torch.testing.assert_close(tokens(y), torch.stack([tokens(row) for row in y]))


def test_odd_channel_counts():
    assert fdse.DSEBlock(fdse.Args(G=3), 4, 7, 3, 1, 1)(torch.randn(2, 4, 5, 5)).shape == (2, 7, 5, 5)


def test_table_a6_shapes():
    net, x = alexnet().eval(), torch.randn(1, 3, 224, 224)
    shapes = []
    for layer in net.body:
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(64, 55, 55), (64, 27, 27), (192, 27, 27), (192, 13, 13), (384, 13, 13), (256, 13, 13),
                      (256, 13, 13), (256, 6, 6), (256, 6, 6), (9216,), (1024,), (1024,)]


def test_table4_sizes():
    """Table 4 says 24.87 MiB: the official code's first version. Default and --variant official are within 0.1% of it."""
    first = mib(alexnet(block_bias=True, fc_identity=False))
    assert round(first, 2) == 24.87
    assert sum(v.numel() for n, v in alexnet().state_dict().items() if "num_batches" not in n) == 6_516_010
    assert abs(mib(alexnet()) / 24.87 - 1) < 1e-3 and abs(mib(alexnet(block_bias=True, pad=False)) / 24.87 - 1) < 1e-3


def test_table4_flops():
    """Multiply-adds of a forward pass of 50 images at 256x256: 4.41e10 for AlexNet and 2.24e10 for FDSE, to 1.5%."""
    def multiply_adds(net):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net.eval()(torch.zeros(1, 3, 256, 256))
        return counter.get_total_flops() / 2 * 50

    plain, ours = multiply_adds(networks.Net(networks.alexnet_bn(), 1024, 10)), multiply_adds(alexnet())
    assert abs(plain / 4.41e10 - 1) < 0.015 and abs(ours / 2.24e10 - 1) < 0.015
    assert 0.49 < ours / plain < 0.52


@pytest.mark.parametrize("name,size", [("resnet18", 32), ("resnet50", 32), ("resnet18_3x3", 16), ("vit_b8", 16)])
def test_blocks_in_other_networks(name, size):
    """Sec. A8.1: one block for each residual block or feed-forward layer; all of it is trained."""
    args = fdse.Args(backbone=name, image_size=size)
    net = fdse.build(args, 3, 7)
    blocks = [m for m in net.modules() if isinstance(m, fdse.DSEBlock)]
    assert len(blocks) == {"resnet18": 8, "resnet50": 16, "resnet18_3x3": 8, "vit_b8": 12}[name]
    z = net.features(torch.randn(3, 3, size, size))
    l_con, _ = fdse.consistency([b.statistics for b in blocks],
                                [(b.bn_dfe.running_mean, b.bn_dfe.running_var) for b in blocks], None, 0.001)
    (net.classify(z).logsumexp(1).sum() + l_con).backward()
    assert all(p.grad is not None for p in net.parameters())
    parts = fdse.Parts(net, "layer")
    assert len(parts.v_layers) == len(blocks)


# Eqs. (4)-(7)


@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (6, 3)])
def test_eq4_and_its_gradient(shape):
    torch.manual_seed(0)
    x = (3 * torch.randn(shape, dtype=torch.float64) + 1).requires_grad_()
    mean, variance = fdse.BatchStatistics.apply(x)
    flat = x.transpose(0, 1).reshape(3, -1)
    torch.testing.assert_close(mean, flat.mean(1))
    torch.testing.assert_close(variance, ((flat - flat.mean(1, keepdim=True)) ** 2).mean(1), rtol=1e-6, atol=1e-7)
    assert torch.autograd.gradcheck(fdse.BatchStatistics.apply, x, atol=1e-6)


def test_eq4_in_bf16_and_of_a_dead_channel():
    x = torch.randn(40, 3, 6, 6)
    x[:, 1] = 2.5
    mean, variance = fdse.BatchStatistics.apply(x.bfloat16().requires_grad_())
    assert mean.dtype == torch.float32
    want_var, want = torch.var_mean(x.bfloat16().double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(variance.double(), want_var, atol=1e-5, rtol=1e-5)


def test_eq4_gradient_in_bf16():
    """Within the stated 1% of float64 autograd, for means of up to 5 deviations."""
    torch.manual_seed(0)
    x = (torch.randn(50, 6, 9, 9) + torch.arange(6.0)[:, None, None]).bfloat16()
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    for leaf, (mean, variance) in ((a, fdse.BatchStatistics.apply(a)),
                                   (b, torch.var_mean(b, (0, 2, 3), correction=0)[::-1])):
        (mean.square().sum() + 3 * (variance - 2).square().sum()).backward()
    assert (a.grad.double() - b.grad).norm() / b.grad.norm() < 0.01


def test_eq5_eq6_eq7_by_hand():
    """Two layers, two batches; numbers small enough for a sheet of paper. gamma 0.5."""
    glob = [(tensor([0.0, 0.0]), tensor([1.0, 1.0])), (tensor([1.0]), tensor([2.0]))]
    batch = [(tensor([2.0, 4.0]), tensor([3.0, 1.0])), (tensor([1.0]), tensor([6.0]))]
    loss, hat = fdse.consistency(batch, glob, None, beta=0.0, gamma=0.5)
    # layer 1: mu_hat (1, 2), var_hat (2, 1): (1 + 4)/2 + (1.5 - 1)^2 = 2.75; layer 2: var_hat 4: (4 - 2)^2 = 4
    assert math.isclose(loss.item(), 0.5 * 2.75 + 0.5 * 4, rel_tol=1e-6)
    loss, hat = fdse.consistency(batch, glob, hat, beta=math.log(3), gamma=0.5)
    # layer 1: mu_hat (1.5, 3), var_hat (2.5, 1): (2.25 + 9)/2 + 0.75^2 = 6.1875; layer 2: var_hat 5: 9; weights 1/4, 3/4
    assert math.isclose(loss.item(), 0.25 * 6.1875 + 0.75 * 9, rel_tol=1e-6)
    torch.testing.assert_close(hat[0][0], tensor([1.5, 3.0]))


def test_eq5_gradient_goes_through_the_current_batch_only():
    mu = tensor([1.0], requires_grad=True)
    glob, var = [(tensor([0.0]), tensor([1.0]))], tensor([1.0])
    _, hat = fdse.consistency([(mu, var)], glob, None, 0.0)
    assert not hat[0][0].requires_grad
    loss, _ = fdse.consistency([(mu, var)], glob, hat, 0.0)
    loss.backward()
    assert math.isclose(mu.grad.item(), 2 * (0.9 * 0.1 + 0.1) * 0.1, rel_tol=1e-5)  # 2 mu_hat (1 - gamma)


def test_eq7_weights_of_seven_layers():
    """beta 0.001 runs from 0.1424 to 0.1433: uniform in practice."""
    w = fdse.depth_weights(7, 0.001)
    assert math.isclose(sum(w), 1) and round(w[0], 4) == 0.1424 and round(w[-1], 4) == 0.1433
    assert all(math.isclose(b / a, math.exp(0.001)) for a, b in itertools.pairwise(w))


def test_official_loss_against_a_plain_transcription():
    torch.manual_seed(0)
    batch = [(torch.randn(n), None) for n in (5, 7)]
    glob = [(torch.randn(n), torch.rand(n) + 0.5) for n in (5, 7)]
    loss, state = None, None
    for _ in range(2):
        loss, state = fdse.consistency_official(batch, glob, state, beta=0.3)
    f = v = None
    for _ in range(2):
        mean_loss = var_loss = 0.0
        w = [math.exp(0.3 * i) for i in range(2)]
        for i in range(2):
            m, s = float(batch[i][0].mean()), float(batch[i][0].var())
            f, v = (m, s) if f is None else (0.9 * f + 0.1 * m, 0.9 * v + 0.1 * s)
            g, gv = glob[i][0].tolist(), glob[i][1].tolist()
            mean_loss += w[i] / sum(w) * sum((a * a - f * f) / (2 * v) for a in g) / len(g)
            var_loss += w[i] / sum(w) * 0.5 * sum(math.log(v / (a + 1e-8)) + a / (v + 1e-8) for a in gv) / len(gv)
    assert math.isclose(loss.item(), mean_loss + var_loss, rel_tol=1e-4)


# Eqs. (8)-(9)


def test_eq8_min_norm_against_brute_force():
    """Against every active set: on each subset the minimizer of u'Gu with sum 1 is known; take the best feasible one."""
    torch.manual_seed(0)
    for trial in range(40):
        N = 2 + trial % 4
        d = F.normalize(torch.randn(N, 3 + trial % 5, dtype=torch.float64) + (trial % 3) * torch.ones(1), dim=1)
        G = d @ d.T
        best = math.inf
        for r in range(1, N + 1):
            for S in itertools.combinations(range(N), r):
                kkt = torch.ones(r + 1, r + 1, dtype=torch.float64)
                kkt[:r, :r], kkt[r, r] = G[list(S)][:, list(S)], 0
                rhs = torch.zeros(r + 1, dtype=torch.float64)
                rhs[r] = 1
                u = torch.linalg.lstsq(kkt, rhs[:, None], driver="gelsd").solution[:r, 0]
                if (u > -1e-9).all() and abs(u.sum() - 1) < 1e-6:
                    best = min(best, float(u @ G[list(S)][:, list(S)] @ u))
        u = fdse.min_norm(G)
        assert (u >= 0).all() and math.isclose(u.sum(), 1, rel_tol=1e-9)
        assert abs(float(u @ G @ u) - best) < 1e-9


def test_eq8_two_clients_by_hand():
    """Updates (3, 0) and (0, 4): unit vectors e1, e2, min-norm point (1/2, 1/2), mean norm 3.5."""
    torch.testing.assert_close(fdse.consensus(tensor([[3.0, 0.0], [0.0, 4.0]])), tensor([1.75, 1.75]))


def test_eq8_no_client_is_harmed():
    """The printed guarantee: the aggregated update has no negative product with any client's."""
    torch.manual_seed(1)
    for _ in range(20):
        delta = torch.randn(5, 40) + 0.3
        assert (delta @ fdse.consensus(delta) >= -1e-4).all()


def test_eq8_opposite_and_zero_updates():
    assert fdse.consensus(tensor([[1.0, 0.0], [-2.0, 0.0]])).norm() < 1e-6  # the hull holds 0: the layer does not move
    assert (fdse.consensus(torch.zeros(3, 4)) == 0).all()
    torch.testing.assert_close(fdse.consensus(tensor([[0.0, 0.0], [0.0, 4.0]])), tensor([0.0, 2.0]))


def test_eq9_two_clients_by_hand():
    V, tau = tensor([[2.0, 0.0], [0.0, 3.0]]), 0.5  # cosine 0: softmax of (2, 0)
    a = math.exp(2) / (math.exp(2) + 1)
    torch.testing.assert_close(fdse.personalize(V, tau), tensor([[2 * a, 3 * (1 - a)], [2 * (1 - a), 3 * a]]))


def test_eq9_limits_of_tau():
    V = torch.randn(4, 10)
    torch.testing.assert_close(fdse.personalize(V, 1e-4), V)
    torch.testing.assert_close(fdse.personalize(V, 1e6), V.mean(0).expand(4, 10), atol=1e-5, rtol=1e-4)


# Who keeps and sends what; Algorithms 1 and 3


def test_every_entry_has_one_fate():
    for unit in ("layer", "tensor"):
        net = alexnet()
        parts = fdse.Parts(net, unit)
        names = parts.u + parts.v + parts.bn_dse + parts.bn_dfe
        assert sorted(names) == sorted(net.state_dict()) and len(set(names)) == len(names)
        for layers, part in ((parts.u_layers, parts.u), (parts.v_layers, parts.v)):
            assert sorted(n for names in layers.values() for n in names) == sorted(part)
    parts = fdse.Parts(net, "layer")
    assert len(parts.u_layers) == 8 and len(parts.v_layers) == 7  # 7 DFE modules and the head; 7 DSE modules
    assert parts.v_layers["body.0"] == [f"body.0.{n}" for n in ("bn_dse.weight", "bn_dse.bias", "dse.weight", "dse.bias")]


def test_what_travels_and_what_moves():
    args = small_args()
    server, clients, net, _ = federation(args)
    before = common.copied(server.state_dict())
    downs = [server.download(k) for k in range(3)]
    uploads = {k: c.train(downs[k], 0) for k, c in enumerate(clients)}
    assert all(d.keys() == {"u", "v", "bn_dfe"} for d in downs)
    assert all(u.keys() == {"u", "v", "bn_dfe", "bn_dse"} for u in uploads.values())
    for part in ("u", "v"):  # every trainable tensor moves (a bias before BN only by rounding, so it is left out)
        for name, value in uploads[0][part].items():
            if not name.endswith(("dfe.bias", "dse.bias")) or "bn" in name:
                assert not torch.equal(value, downs[0][part][name]), name
    server.update(uploads, 0)
    for part, now in (("bn_dfe", server.bn_dfe), ("bn_dse", server.download(99)["bn_dse"])):  # plain means
        for name, value in now.items():
            torch.testing.assert_close(value.double(), torch.stack([u[part][name] for u in uploads.values()]).double()
                                       .mean(0).round(decimals=0 if "num" in name else 12))
    names = server.parts.u_layers["body.0"]
    delta = torch.stack([torch.cat([(u["u"][n] - before["u"][n]).flatten() for n in names]) for u in uploads.values()])
    want = torch.cat([before["u"][n].flatten() for n in names]) + fdse.consensus(delta)
    torch.testing.assert_close(torch.cat([server.u[n].flatten() for n in names]), want)
    unseen = server.download(99)
    for name, value in unseen["v"].items():
        torch.testing.assert_close(value, torch.stack([server.v[k][name] for k in range(3)]).mean(0))


def test_own_statistics_stay_with_the_client():
    args = small_args()
    server, clients, net, _ = federation(args)
    uploads = {k: c.train(server.download(k), 0) for k, c in enumerate(clients)}
    server.update(uploads, 0)
    for k, c in enumerate(clients):
        held = c.model(server.download(k)).state_dict()
        for name in server.parts.bn_dse:
            assert torch.equal(held[name], uploads[k]["bn_dse"][name])
        for name in server.parts.bn_dfe:
            assert torch.equal(held[name], server.bn_dfe[name])


def test_switches_off_leave_fedavg_with_local_bn_dse():
    """lambda 0, G 1, without A and B: plain uniform averaging of a network with two BNs a layer, the first one local."""
    flags = ("--lambda", 0, "--G", 1, "--no-consensus", "--no-similarity", "--adapt-epochs", 0)
    args = small_args(*map(str, flags))
    server, clients, net, data = federation(args)
    common.seed_all(0)
    twin = fdse.build(args, 1, 10)
    local = {n for n in twin.state_dict() if ".bn_dse." in n}
    shared = {k: v.clone() for k, v in twin.state_dict().items()}
    own = [{n: shared[n].clone() for n in local} for _ in clients]
    for t in range(2):
        uploads, states = {}, []
        for k, c in enumerate(clients):
            common.seed_all(7, t, k)
            uploads[k] = c.train(server.download(k), t)
            common.seed_all(7, t, k)
            twin.load_state_dict(shared | own[k])
            twin.train()
            for x, y in common.batches(data[k].train, args, t, k):
                twin.zero_grad()
                F.cross_entropy(twin(x), y).backward()
                with torch.no_grad():
                    for p in twin.parameters():
                        p -= args.lr * p.grad
            states.append({n: v.clone() for n, v in twin.state_dict().items()})
            own[k] = {n: states[-1][n] for n in local}
        server.update(uploads, t)
        shared = {n: sum(s[n] for s in states) / 3 if v.is_floating_point() else v for n, v in shared.items()}
    for k, c in enumerate(clients):
        held = c.model(server.download(k)).state_dict()
        for name, value in held.items():
            if "num_batches" not in name:
                want = own[k][name] if name in local else shared[name]
                torch.testing.assert_close(value, want, atol=1e-5, rtol=1e-4)


def test_lambda_zero_has_no_consistency_and_lambda_moves_the_weights():
    args = small_args()
    ups = []
    for lambda_ in (0.0, 1.0):
        a = dataclasses.replace(args, lambda_=lambda_)
        server, clients, *_ = federation(a)
        ups.append(clients[0].train(server.download(0), 0))
        assert ("consistency" in clients[0].log) == (lambda_ > 0)
    assert not torch.equal(ups[0]["u"]["body.0.dfe.weight"], ups[1]["u"]["body.0.dfe.weight"])
    a = dataclasses.replace(args, con_from=1)
    server, clients, *_ = federation(a)
    clients[0].train(server.download(0), 0)
    assert "consistency" not in clients[0].log


def test_algorithm3_changes_dse_only_lowers_l_con_and_needs_no_labels():
    args = small_args("--protocol", "lodo", "--target", "d75", "--limit", "60")
    server, clients, net, _ = federation(args)
    target = common.make_clients(args, common.load_domains(args)[0], 10)[1][0]  # its 60 images are four batches
    for t in range(2):
        server.update({k: c.train(server.download(k), t) for k, c in enumerate(clients)}, t)
    down = server.download(5)
    unseen = fdse.Client(args, net, 5, target)
    start = down["u"] | down["v"] | down["bn_dfe"] | down["bn_dse"]
    adapted = common.state(unseen.model(down))
    changed = {n for n in adapted if not torch.equal(adapted[n], start[n])}
    assert changed and all(".dse." in n or ".bn_dse." in n for n in changed)
    assert any(n.endswith("dse.weight") for n in changed)

    def l_con(tensors):
        net.load_state_dict(tensors)
        net.train()
        net.features(target.test.batch(torch.arange(len(target.test)))[0])
        blocks = unseen.blocks
        return fdse.consistency([b.statistics for b in blocks], [(start[n + ".running_mean"], start[n + ".running_var"])
                                for n in (f"body.{i}.bn_dfe" for i in (0, 2, 6))], None, args.beta)[0].item()

    statistics_only = fdse.Client(dataclasses.replace(args, adapt_lr=1e-12), net, 5, target)
    values = l_con(start), l_con(common.state(statistics_only.model(down))), l_con(adapted)
    assert values[2] < values[0] and values[2] < values[1]  # the gradient does its part
    target.test.labels = torch.zeros_like(target.test.labels)
    again = common.state(fdse.Client(args, net, 5, target).model(down))
    assert all(torch.equal(again[n], adapted[n]) for n in adapted)
    still = fdse.Client(dataclasses.replace(args, adapt_epochs=0), net, 5, target)
    assert all(torch.equal(v, start[n]) for n, v in still.model(down).state_dict().items())


@pytest.mark.parametrize("flags", [("--variant", "official"), ("--evaluated", "trained"), ("--unit", "tensor"),
                                   ("--protocol", "lodo", "--target", "d30"), ("--participation", "0.5"),
                                   ("--clients-per-domain", "2", "--dirichlet", "5"), ("--precision", "bf16")])
def test_runs_at_smoke_scale(tmp_path, flags):
    result = run_here("fdse", tmp_path / "run", *flags)
    assert result["last"]["round"] == 2 and 0 <= result["best"]["ALL"] <= 1
    assert ("target" in result["best"]) == ("lodo" in flags)
    assert all(h["clients"] for h in metrics(tmp_path / "run"))


@pytest.mark.parametrize("scale", ["paper", "laptop", "smoke"])
@pytest.mark.parametrize("variant", ["paper", "official"])
def test_networks_take_the_images_of_every_scale(scale, variant):
    args = parsed("fdse", "--dataset", "officecaltech", "--scale", scale, "--variant", variant)
    fdse.build(args, 3, 10).eval()(torch.zeros(1, 3, args.image_size, args.image_size))


def test_an_unseen_client_gets_the_means_over_all_clients_also_of_those_not_sampled():
    args = small_args()
    server, clients, *_ = federation(args)
    ups = [{k: clients[k].train(server.download(k), k)} for k in (0, 1)]
    for t, up in enumerate(ups):
        server.update(up, t)
    name = server.parts.bn_dse[0]
    want = (ups[0][0]["bn_dse"][name] + ups[1][1]["bn_dse"][name] + torch.zeros_like(ups[0][0]["bn_dse"][name])) / 3
    assert name.endswith("running_mean")
    torch.testing.assert_close(server.download(9)["bn_dse"][name], want)


def test_official_variant_sets_all_its_choices_and_a_flag_wins():
    args = parsed("fdse", "--dataset", "officecaltech", "--variant", "official", "--beta", "0.2")
    assert (args.lambda_, args.beta, args.lr_decay, args.weight_decay, args.image_size) == (0.05, 0.2, 0.9998, 1e-3, 256)
    assert (args.con_loss, args.unit, args.evaluated, args.pad) == ("official", "tensor", "trained", False)
    paper = parsed("fdse", "--dataset", "officecaltech10")
    assert (paper.rounds, paper.batch_size, paper.epochs, paper.lr_decay, paper.clip) == (500, 50, 1, 0.998, 10)
    assert parsed("fdse", "--dataset", "pacs").epochs == 5
