"""FDSE's rounds and its adaptation computed a second time, in plain torch and without a line of fdse.py, with
every coefficient and switch away from the value at which it does nothing; in float64, so that little but
rounding is forgiven."""

import math
import sys

import common
import fdse
import official.fdse
from tests.plain_torch import ClippedSGD, dse_block, linear
from tests.conftest import parsed
from tests.methods.test_fdse import SMALL, federation, nearest_to_zero, small_args, target_of
from tests.three_clients import one_round

import pytest
import torch
from torch import nn
from torch.nn import functional as F

FLAGS = ["--lambda", 2, "--beta", 0.4, "--tau", 0.05, "--clip", 0.7, "--weight-decay", 0.02,
         "--momentum", 0.5, "--lr-decay", 0.5]
BLOCKS = ("body.0", "body.2", "body.6")  # the last one is linear


@pytest.fixture(autouse=True)
def images_in_float64(monkeypatch):
    for method in (fdse, official.fdse):
        monkeypatch.setattr(method, "batches", batches)


def batches(*of_client):
    for x, y in common.batches(*of_client):
        yield x.double(), y


def prepared(args):
    """Server, clients, network and data in float64; biases and scales too are as if trained."""
    _, _, net, data = federation(args)
    net.double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.add_(0.1 * torch.sin(torch.arange(p.numel()).view(p.shape) + len(name)))
    method = sys.modules[type(args).__module__]
    clients = [method.Client(args, net, k, data[k]) for k in range(3)]
    return method.Server(args, net, 3), clients, net, data


# The network: w has all weights and statistics by name


def block(x, w, name, seen, adapting):
    """One block, whose BN updates its running statistics in w in training; the mean and variance of each
    channel of what it gives to BN_DFE are added to `seen`."""
    def norm(bn, h):
        axes = [axis for axis in range(h.dim()) if axis != 1]
        if bn.endswith("bn_dfe"):
            seen.append(torch.var_mean(h, axes, correction=0)[::-1])
        running = w[bn + ".running_mean"], w[bn + ".running_var"]
        training = bn.endswith("bn_dse") or not adapting
        return F.batch_norm(h, *running, w[bn + ".weight"], w[bn + ".bias"], training=training, momentum=0.1)
    return dse_block(w, name, x, norm, padding=1).relu()


def logits(x, w, seen, adapting=False):
    x = F.max_pool2d(block(x, w, "body.0", seen, adapting), 2)
    x = F.max_pool2d(block(x, w, "body.2", seen, adapting), 2)
    x = F.adaptive_avg_pool2d(x, 7).flatten(1)
    return linear(block(x, w, "body.6", seen, adapting), w, "head")


# L_Con


def bn_dfe_of(w):
    """(mean, variance) of each BN_DFE."""
    pairs = []
    for name in BLOCKS:
        pairs.append((w[f"{name}.bn_dfe.running_mean"].clone(), w[f"{name}.bn_dfe.running_var"].clone()))
    return pairs


def l_con(seen, glob, kept, beta):
    """L_Con; `kept` has the running means of the batches before."""
    weights = [math.exp(beta * l) for l in range(3)]
    loss = 0
    for l, ((mean, variance), (mu_g, var_g)) in enumerate(zip(seen, glob)):
        mean = 0.9 * kept.get((l, "mean"), mu_g) + 0.1 * mean
        variance = 0.9 * kept.get((l, "variance"), var_g) + 0.1 * variance
        kept[l, "mean"], kept[l, "variance"] = mean.detach(), variance.detach()
        term = ((mean - mu_g) ** 2).mean() + (variance.mean() - var_g.mean()) ** 2
        loss = loss + weights[l] / sum(weights) * term
    return loss


# A client, and the server


def trained_by_hand(w, parameters, part, args, t, k):
    """w after local training."""
    w = {name: value.clone() for name, value in w.items()}
    glob, kept, l_cons = bn_dfe_of(w), {}, []
    sgd = ClippedSGD(args.lr * args.lr_decay ** t, args.momentum, args.weight_decay, args.clip)
    for x, y in batches(part, args, t, k):
        leaves, seen = {name: w[name].clone().requires_grad_() for name in parameters}, []
        loss = F.cross_entropy(logits(x, w | leaves, seen), y)
        if t >= args.con_from and args.lambda_:
            term = l_con(seen, glob, kept, args.beta)
            loss = loss + args.lambda_ * term
            l_cons.append(float(term.detach()))
        sgd.step(loss, leaves, w)
    assert min(sgd.norms) > args.clip  # clipping is active
    for name in w:
        if name.endswith("num_batches_tracked"):
            w[name] = w[name] + len(sgd.norms)
    return w, sum(l_cons) / max(1, len(l_cons))


def groups(names, args):
    """The names whose tensors are aggregated as one: those of a module's block, or each alone."""
    if args.unit == "tensor":
        return [[name] for name in names]
    of = {}
    for name in names:
        of.setdefault(".".join(name.split(".")[:2]) if name.startswith("body") else "head", []).append(name)
    return list(of.values())


def flat(w, names):
    return torch.cat([w[name].flatten() for name in names])


def put(w, names, row):
    for name in names:
        count = w[name].numel()
        w[name], row = row[:count].view(w[name].shape), row[count:]


def aggregated_by_hand(w, own, states, u_names, v_names, args):
    """The server's step on w (theta_u and BN_DFE's statistics) and on each client's theta_v, in place.
    Returns a client's weight for itself, mean over clients and layers."""
    for names in groups(u_names, args):
        old = flat(w, names)
        delta = torch.stack([flat(state, names) - old for state in states])
        step = delta.mean(0)
        if args.consensus:
            norms = delta.norm(dim=1)
            d = delta / norms[:, None]
            step = norms.mean() * (nearest_to_zero(d) @ d)
        put(w, names, old + step)
    for_itself = []
    for names in groups(v_names, args):
        V = torch.stack([flat(state, names) for state in states])
        unit = V / V.norm(dim=1, keepdim=True)
        for k, tensors in enumerate(own):
            attention = torch.eye(len(V), dtype=V.dtype)[k]
            if args.similarity:
                attention = (unit @ unit[k] / args.tau).exp()
            attention = attention / attention.sum()
            for_itself.append(attention[k])
            put(tensors, names, attention @ V)
    for name in w:
        if ".bn_dfe." in name and "num_batches" in name:
            w[name] = states[0][name]
        elif ".bn_dfe.running" in name:
            w[name] = sum(state[name] for state in states) / len(states)
    return sum(for_itself) / len(for_itself)


def assert_same(tensors, want):
    for name, value in tensors.items():
        def said(message, name=name):
            return f"{name}: {message}"
        torch.testing.assert_close(value, want[name], atol=1e-6, rtol=1e-5, msg=said)


@pytest.mark.parametrize("flags", [
    [],
    ["--no-consensus", "--no-similarity", "--lambda", "0"],  # FedAvg with local DSE modules
    ["--no-similarity", "--block-bias", "--own-bias"],
    ["--no-block-bias", "--no-own-bias", "--unit", "tensor"],
], ids=" ".join)
def test_two_rounds_by_hand(flags):
    """Uploads, L_Con and the server's state against a second computation in plain torch, in float64. The
    second round has two of the three clients, in another order."""
    args = small_args(*FLAGS, *flags)
    server, clients, net, data = prepared(args)
    start = common.state(net)
    parameters = [name for name, _ in net.named_parameters()]
    v_names = [name for name in parameters if ".dse." in name or ".bn_dse." in name]
    if args.own_bias:
        v_names += [f"{name}.bias" for name in BLOCKS]
    u_names = [name for name in parameters if name not in v_names]
    w = {name: start[name] for name in start if name in u_names or ".bn_dfe." in name}
    own = [{name: start[name] for name in v_names} for _ in clients]
    statistics = [name for name in start if ".bn_dse." in name and name not in parameters]
    kept = [{name: start[name] for name in statistics} for _ in clients]
    trained = {}
    for t, chosen in enumerate(((0, 1, 2), (2, 0))):
        uploads = {}
        for k in chosen:
            uploads[k] = clients[k].train(server.download(k), t)
            state, mean_l_con = trained_by_hand(w | own[k] | kept[k], parameters, data[k].train, args, t, k)
            for part in uploads[k].values():
                assert_same(part, state)
            assert float(clients[k].log.get("consistency", 0)) == pytest.approx(mean_l_con, rel=1e-6)
            trained[k] = state
            kept[k] = {name: state[name] for name in statistics}
        server.update(uploads, t)
        states, of_round = [trained[k] for k in chosen], [own[k] for k in chosen]
        for_itself = aggregated_by_hand(w, of_round, states, u_names, v_names, args)
        assert server.log.get("attention", 1) == pytest.approx(for_itself)
        assert_same(server.u | server.bn_dfe, w)
        for k, client in enumerate(clients):
            assert_same(server.v[k], own[k])
            assert_same(client.model(server.download(k)).state_dict(), w | own[k] | kept[k])


@pytest.mark.parametrize("method", ["fdse", "official.fdse --variant paper"])
def test_the_adaptation_by_hand(method):
    """Algorithm 3 on the target's images in batches, twice: BN_DSE normalizes by the batch, all else, BN
    outside the blocks too, keeps its statistics; only theta_v moves. The images are as they are, whatever
    training does."""
    flags = ["--protocol", "lodo", "--target", "d75", "--beta", "0.4", "--adapt-epochs", "2",
             "--adapt-lr", "3", "--augment", "crops"]
    args = parsed(*method.split(), *SMALL, *flags)
    server, clients, net, _ = prepared(args)
    last = {}  # the last upload of each client, also of the one that misses the second round
    for t, chosen in enumerate(((0, 1, 2), (0, 1))):
        last |= one_round(server, clients, t, chosen)
    w = server.u | server.bn_dfe
    for name in server.v[0]:
        w[name] = sum(v[name] for v in server.v.values()) / 3
    for name in last[0]["bn_dse"]:
        w[name] = sum(up["bn_dse"][name] for up in last.values()) / 3
    target = target_of(args)
    down = server.download(9)
    outside = nn.BatchNorm1d(64, affine=False, track_running_stats=False)
    net.body.append(outside)
    held = common.state(type(clients[0])(args, net, 9, target).model(down))
    assert not outside.training
    glob, kept = bn_dfe_of(w), {}
    for epoch in range(2):
        order = torch.randperm(40, generator=common.seed_all(args.seed, "batches", 0, 9, epoch))
        for rows in order.split(16):
            x = target.test.batch(rows)[0].double()
            for name in server.v[0]:
                w[name] = w[name].detach().requires_grad_()
            seen = []
            logits(x, w, seen, adapting=True)
            loss = l_con(seen, glob, kept, args.beta)
            gradients = torch.autograd.grad(loss, [w[name] for name in server.v[0]])
            for name, g in zip(server.v[0], gradients):
                w[name] = w[name].detach() - 3 * g
    compared = {name: value for name, value in held.items() if "num_batches" not in name}
    assert_same(compared, w)
    moved = max(float((held[name] - down["v"][name]).abs().max()) for name in server.v[0])
    assert moved > 1e-3
