"""fedgala.py, learners.py and baselines/fedema.py against independent calculations, most of them in float64."""

import copy
import dataclasses
import math

import common
import fedgala
from baselines import fedema
from tests.conftest import METHODS, interrupted, metrics, parsed, run_here

import learners
import numpy as np
import pytest
import torch
from torch import tensor
from torch.nn.functional import normalize

SMALL = ("--limit", "48", "--batch-size", "8", "--hidden", "16", "--dim", "8", "--precision", "fp32", "--target", "d75")


def federation(method: str, *flags, K=2):
    """(args, server, K clients, net) on a few digits."""
    module, build = METHODS[method]
    args = parsed(method, *SMALL, *flags)
    domains, classes = common.load_domains(args)
    members, _ = common.make_clients(args, domains, len(classes))
    common.seed_all(args.seed, "init")
    net = build(args, 1, len(classes)).to(memory_format=torch.channels_last)
    return args, module.Server(args, net, K), [module.Client(args, net, k, members[k]) for k in range(K)], net


def rounds(args, server, clients, T: int) -> list[dict]:
    """T rounds as the loop does them; returns the downloads."""
    downs = []
    for t in range(T):
        uploads = {}
        for c in clients:
            down = server.download(c.k)
            common.seed_all(args.seed, "train", t, c.k)
            uploads[c.k] = c.train(down, t)
        downs.append(down["w"])
        server.update(uploads, t)
    return downs


# Learners


def test_nt_xent():
    """SimCLR, Eq. (1), pair by pair."""
    z, tau, B = torch.randn(10, 6, dtype=torch.float64), 0.3, 5
    u = [v / v.norm() for v in z]
    terms = []
    for i in range(2 * B):
        j = (i + B) % (2 * B)
        others = sum(math.exp(float(u[i] @ u[k]) / tau) for k in range(2 * B) if k != i)
        terms.append(-math.log(math.exp(float(u[i] @ u[j]) / tau) / others))
    assert float(learners.nt_xent(z, tau)) == pytest.approx(np.mean(terms), rel=1e-5)


def test_info_nce():
    """MoCo, Eq. (1): the own key against the queue alone, not against the batch's other keys."""
    q, k, queue, tau = torch.randn(4, 5).double(), torch.randn(4, 5).double(), normalize(torch.randn(7, 5)), 0.2
    terms = []
    for a, b in zip(q, k):
        a, b = a / a.norm(), b / b.norm()
        old = sum(math.exp(float(a @ n.double()) / tau) for n in queue)
        own = math.exp(float(a @ b) / tau)
        terms.append(-math.log(own / (own + old)))
    assert float(learners.info_nce(q, k, queue, tau)) == pytest.approx(np.mean(terms), rel=1e-5)


def test_moco_queue_and_momentum():
    """Keys take the places of the oldest ones around the end of the queue; the key encoder moves by 1 - m; keys have no
    gradient."""
    args, _, (client, _), net = federation("fedgala", "--ssl", "moco", "--queue", "10", "--ema", "0.9")
    net.begin()
    net.train()
    old = net.queue.clone()
    for turn in range(3):  # 4 keys each: places 0-3, 4-7, 8-9 and 0-1
        loss = net.loss(torch.rand(4, 1, 28, 28), torch.rand(4, 1, 28, 28))
        loss.backward()
        assert not net.keys.requires_grad and all(p.grad is None for p in net.target.parameters())
        keys = net.keys.double() / net.keys.double().norm(dim=1, keepdim=True)
        before = [p.clone() for p in net.target.parameters()]
        with torch.no_grad():
            for p in net.g.parameters():
                p.add_(0.1)
        net.after_step()
        places = [(4 * turn + i) % 10 for i in range(4)]
        torch.testing.assert_close(net.queue[places].double(), keys, atol=1e-6, rtol=0)
        kept = [i for i in range(10) if i not in places]
        assert turn or torch.equal(net.queue[kept], old[kept])
        for was, now, p in zip(before, net.target.parameters(), [*net.f.parameters(), *net.g.parameters()]):
            torch.testing.assert_close(now, 0.9 * was + 0.1 * p, atol=1e-6, rtol=1e-5)
    assert int(net.position) == 2
    net.loss(torch.rand(23, 1, 28, 28), torch.rand(23, 1, 28, 28))  # more keys than places: the newest ten stay
    newest = normalize(net.keys[13:])
    net.after_step()
    assert int(net.position) == 5
    torch.testing.assert_close(net.queue.roll(-5, 0), newest)


def test_similarities_are_float32_under_autocast():
    z, queue = torch.randn(6, 4), normalize(torch.randn(5, 4))
    with torch.autocast("cpu", torch.bfloat16):
        found = learners.nt_xent(z, 0.1), learners.info_nce(z, z + 0.1, queue, 0.1)
    assert found == (learners.nt_xent(z, 0.1), learners.info_nce(z, z + 0.1, queue, 0.1))


def unit(v):
    return v / v.norm(dim=1, keepdim=True)


def test_byol_and_simsiam_losses():
    """BYOL, Eq. (2), both ways, against the target network; SimSiam, Eqs. (1)-(4), whose gradient takes the other branch as a
    constant (finite differences of the loss with that branch frozen)."""
    _, _, _, net = federation("fedgala", "--ssl", "byol")
    net.train()
    x1, x2 = torch.rand(6, 1, 28, 28), torch.rand(6, 1, 28, 28)
    p = [unit(net.q(net.g(net.f(x)))) for x in (x1, x2)]
    z = [unit(net.target["g"](net.target["f"](x))) for x in (x1, x2)]
    expected = (p[0] - z[1]).square().sum(1).mean() + (p[1] - z[0]).square().sum(1).mean()
    loss = net.loss(x1, x2)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    assert all(v.grad is None for v in net.target.parameters()) and all(v.grad is not None for v in net.q.parameters())

    _, _, _, net = federation("fedgala", "--ssl", "simsiam")
    net.double().train()
    x1, x2 = x1.double(), x2.double()
    frozen = [unit(net.project(x)).detach() for x in (x1, x2)]

    def with_frozen():
        p = [unit(net.q(net.project(x))) for x in (x1, x2)]
        return -((p[0] * frozen[1]).sum(1).mean() + (p[1] * frozen[0]).sum(1).mean()) / 2

    net.loss(x1, x2).backward()
    assert net.loss(x1, x2).item() == pytest.approx(with_frozen().item(), abs=1e-6)
    weight, h = net.g[3].weight, 1e-5
    for i, j in ((0, 0), (3, 7)):
        with torch.no_grad():
            weight[i, j] += h
            up = with_frozen()
            weight[i, j] -= 2 * h
            down = with_frozen()
            weight[i, j] += h
        assert float(weight.grad[i, j]) == pytest.approx(float(up - down) / (2 * h), rel=1e-3, abs=1e-6)


def test_what_a_learner_keeps_and_sends():
    """Only encoder and projector travel; the predictor, the target network and the queue are each client's own."""
    for ssl, own in (("simclr", set()), ("moco", {"target", "queue", "position"}), ("byol", {"q", "target"}), ("simsiam", {"q"})):
        args, server, clients, _ = federation("fedgala", "--ssl", ssl)
        assert {n.split(".")[0] for n in server.download(0)["w"]} == {"f", "g"}
        start = copy.deepcopy(clients[1].own)
        rounds(args, server, clients[:1], 2)
        assert {n.split(".")[0] for n in clients[0].own} == own
        assert all(torch.equal(v, start[n]) for n, v in clients[1].own.items())  # client 0 has not touched client 1's
        if own:
            assert any(not torch.equal(v, start[n]) for n, v in clients[0].own.items())
        shared = federation("fedgala", "--ssl", ssl, "--predictor", "shared")[1].download(0)["w"]
        assert ("q" in {n.split(".")[0] for n in shared}) == (ssl in ("byol", "simsiam"))


def test_the_target_network_starts_from_the_received_one_and_stays():
    args, server, (client, _), net = federation("fedgala", "--ssl", "byol", "--steps", "1", "--ema", "1", "--local-alignment", "off")
    received = {n: torch.full_like(v, 0.01) if v.is_floating_point() else v for n, v in server.w.items()}
    client.train({"w": received}, 0)
    parameters = {n for n, _ in net.named_parameters()}
    for turn in (1, 2):
        assert all(torch.equal(client.own["target." + n], v) for n, v in received.items() if n in parameters), turn
        client.train({"w": {n: v * 2 for n, v in received.items()}}, 1)  # with m = 1 the target never moves


# Local alignment


def test_unaligned_by_hand():
    gradient = {"a.weight": tensor([1.0, 0.0]), "a.bias": tensor([-3.0]), "b.weight": tensor([0.0, 2.0]), "c.weight": tensor([1.0])}
    change = {"a.weight": tensor([2.0, 0.0]), "a.bias": tensor([1.0]), "b.weight": tensor([1.0, 1.0]), "c.weight": tensor([0.0])}
    tensors, layers = ([*fedgala.units(list(change), unit).values()] for unit in ("tensor", "layer"))
    assert layers == [["a.weight", "a.bias"], ["b.weight"], ["c.weight"]] and len(tensors) == 4
    ask = lambda groups, tau, sign: fedgala.unaligned(gradient, change, groups, tau, sign).tolist()
    # cosines: a.weight 1, a.bias -1, b 1/sqrt 2, c undefined (no change: kept); layer a (2 - 3) / (sqrt 10 sqrt 5) = -0.141
    assert ask(tensors, 0, "paper") == [False, True, False, False]
    assert ask(tensors, 0, "descent") == [True, False, True, False]
    assert ask(layers, 0, "paper") == [True, False, False]
    assert ask(layers, -0.2, "paper") == [False, False, False]
    assert ask(layers, 0.75, "paper") == [True, True, False]
    assert ask(layers, 0.1, "descent") == [False, True, False]


def test_the_reference_is_the_last_change_of_the_global_model(monkeypatch):
    """Line 18; none in the first round, and never for what stays on the client."""
    args, server, clients, _ = federation("fedgala", "--ssl", "byol", "--steps", "2")
    seen = []
    monkeypatch.setattr(fedgala.Client, "align", lambda self, named, change: seen.append((self.k, change)) or tensor(0.0))
    downs = rounds(args, server, clients, 3)
    assert [k for k, _ in seen] == [0, 0, 1, 1] * 2  # rounds 2 and 3
    for i, (_, change) in enumerate(seen):
        t = 1 + i // 4
        assert change and not any(n.startswith(("q.", "target.")) or "running" in n for n in change)
        assert all(torch.equal(v, downs[t][n] - downs[t - 1][n]) for n, v in change.items())


@pytest.mark.parametrize("flags", [(), ("--discard", "zero"), ("--local-alignment", "reweight", "--reweight-factor", "0.01"),
                                   ("--align-unit", "tensor"), ("--alignment-sign", "descent")])
def test_what_happens_to_a_discarded_gradient(flags, monkeypatch):
    """One step of round 2 against a float64 Adam written out here: a skipped tensor keeps its value, its moments and its
    step count; a zero gradient lets the moments decay and the tensor move on; a reweighted one enters with its factor."""
    args, server, (client, _), net = federation("fedgala", "--steps", "1", *flags)
    rounds(args, server, [client], 1)
    gradients = {}
    align = client.align

    def spy(named, change):
        gradients.update({n: p.grad.double().clone() for n, p in named.items()})
        return align(named, change)
    monkeypatch.setattr(client, "align", spy)
    w, opt = {n: v.double() for n, v in server.w.items()}, copy.deepcopy(client.opt)
    change = {n: w[n] - client.before[n].double() for n, _ in net.named_parameters()}
    common.seed_all(args.seed, "train", 1, 0)
    after = client.train(server.download(0), 1)["w"]
    groups = {}
    for n in change:
        groups.setdefault(n if args.align_unit == "tensor" else n.rpartition(".")[0], []).append(n)
    dropped = 0
    for names in groups.values():
        g, d = (torch.cat([x[n].flatten() for n in names]) for x in (gradients, change))
        cosine = float(g @ d / (g.norm() * d.norm()))
        bad = (-cosine if args.alignment_sign == "descent" else cosine) <= 0
        dropped += bad
        for n in names:
            m, v, step = (opt[n][key].double() for key in ("exp_avg", "exp_avg_sq", "step"))
            if bad and args.local_alignment == "discard" and args.discard == "skip":
                assert torch.equal(after[n].double(), w[n])
                assert all(torch.equal(client.opt[n][key], opt[n][key]) for key in opt[n])
                continue
            factor = {"discard": 0, "reweight": args.reweight_factor}[args.local_alignment] if bad else 1
            m, v, step = 0.9 * m + 0.1 * factor * gradients[n], 0.999 * v + 0.001 * (factor * gradients[n]) ** 2, step + 1
            moved = args.lr * (m / (1 - 0.9 ** step)) / ((v / (1 - 0.999 ** step)).sqrt() + 1e-8)
            torch.testing.assert_close(after[n].double(), w[n] - moved, atol=2e-6, rtol=1e-4)
            assert float(client.opt[n]["step"]) == step
    assert 0 < dropped < len(groups) and float(client.log["discarded"]) == pytest.approx(dropped / len(groups))


def test_regularizers():
    """Eqs. (54)-(56): what one step of SGD adds to every parameter is lambda 2 Theta_i, and mu 2 (Theta_i - Theta_g)."""
    moved = {}
    for name, flags in (("plain", ()), ("l2", ("--l2", "0.5")), ("prox", ("--prox", "0.5"))):
        args, server, (client, _), net = federation("fedgala", "--ssl", "moco", "--steps", "2", "--momentum", "0", "--weight-decay",
                                                    "0", "--lr", "0.1", "--local-alignment", "off", *flags)
        steps, step = [], torch.optim.SGD.step

        def spy(opt, *a, **kw):
            steps.append({n: (p.detach().double().clone(), p.grad.double().clone()) for n, p in net.named_parameters() if p.grad is not None})
            return step(opt, *a, **kw)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.SGD, "step", spy)
            common.seed_all(0, "train", 0, 0)
            client.train(server.download(0), 0)
        moved[name] = steps
    start = {n: v.double() for n, v in server.w.items()}
    for n, (p, g) in moved["plain"][0].items():
        torch.testing.assert_close(moved["l2"][0][n][1], g + 2 * 0.5 * p, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(moved["prox"][0][n][1], g, atol=1e-6, rtol=1e-5)  # Theta_i is still Theta_g
        p2, g2 = moved["prox"][1][n]  # so that after one step both runs are at the same place
        torch.testing.assert_close(g2, moved["plain"][1][n][1] + 2 * 0.5 * (p2 - start[n]), atol=1e-5, rtol=1e-3)
    assert max(float((moved["prox"][1][n][0] - start[n]).abs().max()) for n in start if n in moved["prox"][1]) > 1e-3


# Global alignment


def test_aligned_weights_by_hand():
    """Lines 7-11 with the vectors themselves: the result of line 10 goes back into line 8."""
    g = torch.randn(4, 30, dtype=torch.float64) + 0.3
    start = tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    w = start
    for iterations in (1, 2, 3):
        mean = (w[:, None] * g).sum(0)
        w = tensor([(float(v @ mean / (v.norm() * mean.norm())) + 1) / 2 for v in g], dtype=torch.float64)
        w = w / w.sum()
        torch.testing.assert_close(fedgala.aligned_weights(g @ g.T, start, iterations), w, atol=1e-12, rtol=0)
    opposed = tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)  # the heavier one is the mean's direction
    assert fedgala.aligned_weights(opposed @ opposed.T, tensor([0.7, 0.3]).double(), 1).tolist() == [1, 0]
    same = torch.ones(3, 3, dtype=torch.float64)
    assert fedgala.aligned_weights(same, tensor([0.6, 0.3, 0.1]).double(), 3).tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("flags", [(), ("--ga-unit", "layer"), ("--ga-unit", "tensor"), ("--average", "uniform"),
                                   ("--average", "batches"), ("--ga-vectors", "scaled"), ("--no-global-alignment",)])
def test_the_servers_update(flags):
    """Lines 4-12 in float64 with whole vectors, parameters and BN's statistics."""
    args, server, _, net = federation("fedgala", *flags)
    before, K = {n: v.double() for n, v in server.w.items()}, 3
    ups = {k: {"w": {n: v + torch.randn_like(v) * 0.1 if v.is_floating_point() else v + k for n, v in server.w.items()},
               "n": tensor(10 * (k + 1)), "batches": tensor(3 - k)} for k in range(K)}
    server.update(ups, 0)
    p = {"samples": [1 / 6, 2 / 6, 3 / 6], "uniform": [1 / 3] * 3, "batches": [3 / 6, 2 / 6, 1 / 6]}[args.average]
    parameters = [n for n, _ in net.named_parameters()]
    unit_of = {"model": lambda n: "all", "layer": lambda n: n.rpartition(".")[0], "tensor": lambda n: n}[args.ga_unit]
    for name in before:
        w = p
        names = [n for n in parameters if unit_of(n) == unit_of(name)] or [name] * before[name].is_floating_point()
        names = [name] if "running" in name and args.ga_unit == "tensor" else names
        if args.global_alignment and names and "num_batches" not in name:
            g = [torch.cat([(ups[k]["w"][n].double() - before[n]).flatten() for n in names]) for k in range(K)]
            if args.ga_vectors == "scaled":
                g, w = [a * b for a, b in zip(p, g)], [1 / K] * K
            for _ in range(3):
                mean = sum(a * b for a, b in zip(w, g))
                w = [(float(v @ mean) / float(v.norm() * mean.norm()) + 1) / 2 for v in g]
                w = [a / sum(w) for a in w]
        if "num_batches" not in name:
            expected = sum(a * ups[k]["w"][name].double() for k, a in enumerate(w))
            torch.testing.assert_close(server.w[name].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ssl", ["simclr", "simsiam"])
def test_without_alignment_it_is_the_plain_federated_learner(ssl):
    """Three rounds of a federated learner written out here: the same weights."""
    flags = ("--ssl", ssl, "--epochs", "2", "--local-alignment", "off", "--no-global-alignment", "--predictor", "shared")
    args, server, clients, _ = federation("fedgala", *flags)
    _, plain, _, net = federation("fedgala", *flags)
    w, kept = plain.w, [{}, {}]
    for t in range(3):
        after = []
        for k, c in enumerate(clients):
            net.load_state_dict(w, strict=False)
            net.train()
            named = dict(net.named_parameters())
            opt = (torch.optim.Adam(named.values(), 3e-3, fused=True) if ssl == "simclr" else
                   torch.optim.SGD(named.values(), 0.03, momentum=0.9, weight_decay=3e-4, fused=True))
            for n, s in kept[k].items():
                opt.state[named[n]] = copy.deepcopy(s)
            common.seed_all(args.seed, "train", t, k)
            for x, _ in common.batches(c.data.train, args, t, k):
                opt.zero_grad()
                x1, x2 = x[:8], x[8:]
                if ssl == "simclr":
                    z = unit(net.g(net.f(x)))
                    loss = -((z @ z.T / 0.07).masked_fill(torch.eye(16, dtype=bool), -1e9).log_softmax(1)[
                        torch.arange(16), (torch.arange(16) + 8) % 16]).mean()
                else:
                    z1, z2 = net.g(net.f(x1)), net.g(net.f(x2))
                    loss = -((unit(net.q(z1)) * unit(z2.detach())).sum(1).mean() + (unit(net.q(z2)) * unit(z1.detach())).sum(1).mean()) / 2
                loss.backward()
                opt.step()
            kept[k] = {n: dict(opt.state[p]) for n, p in named.items()}
            after.append(common.state(net))
        n = [len(c.data.train) for c in clients]
        w = {name: sum(m * a[name].double() for m, a in zip(n, after)) / sum(n) for name in w}
        w = {name: (v.round() if "num_batches" in name else v).to(plain.w[name].dtype) for name, v in w.items()}
    rounds(args, server, clients, 3)
    for name, v in w.items():
        torch.testing.assert_close(server.w[name], v, atol=2e-4 if "running" in name or ssl == "simclr" else 1e-5, rtol=1e-3)


# Settings, runs


def test_settings_are_the_papers():
    a = parsed("fedgala", "--dataset", "pacs")
    assert (a.backbone, a.crop, a.rounds, a.epochs, a.batch_size) == ("resnet18_3x3", 32, 100, 7, 128)
    assert (a.optimizer, a.lr, a.tau, a.ga_iterations, a.alignment_sign) == ("adam", 3e-3, 0, 3, "paper")
    assert (a.label_ratio, a.linear_lr, a.linear_epochs, a.hidden, a.dim) == ("0.1/0.3", 3e-3, 100, 4096, 2048)
    for ssl, lr in (("moco", 0.025), ("byol", 0.03), ("simsiam", 0.03)):
        b = parsed("fedgala", "--dataset", "pacs", "--ssl", ssl)
        assert (b.optimizer, b.lr, b.momentum, b.weight_decay) == ("sgd", lr, 0.9, 3e-4)
    assert parsed("fedgala", "--ssl", "byol", "--lr", "0.5").lr == 0.5
    byol_with_adam = parsed("fedgala", "--ssl", "byol", "--optimizer", "adam")
    assert (byol_with_adam.lr, byol_with_adam.weight_decay, byol_with_adam.momentum) == (3e-3, 0, 0)
    frozen = parsed("fedgala", "--dataset", "pacs", "--ssl", "byol", "--variant", "official")
    assert (frozen.ema, frozen.predictor, frozen.lr) == (1, "local", 0.03)
    official = parsed("fedgala", "--dataset", "pacs", "--ssl", "simsiam", "--variant", "official")
    assert (official.lr, official.weight_decay, official.average, official.ga_unit, official.probe, official.predictor) == (
        0.025, 1e-4, "batches", "tensor", "projector", "shared")
    assert parsed("fedgala", "--dataset", "domainnet20").sources == "painting,real,sketch"
    e = parsed("baselines.fedema", "--dataset", "pacs")
    assert (e.lr, e.momentum, e.weight_decay, e.autoscale, e.rounds) == (0.03, 0.9, 3e-4, 0.7, 100)


def test_views_differ_and_repeat():
    args, _, (client, _), _ = federation("fedgala")
    first, again = ([x for x, _ in drawn] for drawn in (seeded(args, client, 3), seeded(args, client, 3)))
    assert all(torch.equal(a, b) for a, b in zip(first, again)) and first[0].shape == (16, 1, 28, 28)
    x1, x2 = first[0].chunk(2)
    assert not any(torch.equal(a, b) for a, b in zip(x1, x2))
    assert not torch.equal(first[0], next(iter(seeded(args, client, 4)))[0])
    whole = dataclasses.replace(args, augment="none", crop=28)
    x, y = next(iter(seeded(whole, client, 3)))
    assert torch.equal(*x.chunk(2)) and len(y) == 8
    x, _ = next(iter(seeded(dataclasses.replace(args, augment="none", crop=14), client, 3)))
    assert x.shape[2:] == (14, 14)


def seeded(args, client, t):
    common.seed_all(args.seed, "train", t, 0)
    return list(common.batches(client.data.train, args, t, 0))


def test_the_last_small_batch_is_left_out():
    args, *_ = federation("fedgala", "--batch-size", "20")
    assert [len(p) for p in common.cut_batches(torch.arange(48), args)] == [20, 20]
    assert [len(p) for p in common.cut_batches(torch.arange(12), args)] == [12]
    assert [len(p) for p in common.cut_batches(torch.arange(48), dataclasses.replace(args, drop_last=False))] == [20, 20, 8]
    assert common.images_in_round(48, dataclasses.replace(args, epochs=3)) == 120


@pytest.mark.parametrize("ssl", learners.LEARNERS)
def test_an_interrupted_run_goes_on(tmp_path, ssl, monkeypatch):
    flags = ("--ssl", ssl, "--target", "d0", "--rounds", "4", "--checkpoint-every", "0", "--queue", "24")
    whole = run_here("fedgala", tmp_path / "whole", *flags)
    interrupted("fedgala", monkeypatch, tmp_path / "cut", *flags, after=2)
    again = run_here("fedgala", tmp_path / "cut", *flags)
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert again["last"] == whole["last"] == whole["best"] and again["logs"] == whole["logs"]


def test_a_linear_run_and_its_result(tmp_path, capsys):
    """Accuracies for each share of labels; no validation; a run on fixed sources evaluates all other domains at once."""
    result = run_here("fedgala", tmp_path / "a", "--target", "d0", "--label-ratio", "0.2/0.5")
    assert set(result["last"]["linear"]["d0"]) == {"0.2", "0.5"} and result["last"]["target"] == result["last"]["linear"]["d0"]["0.2"]
    assert result["logs"]["discarded"][0] is None and 0 <= result["logs"]["discarded"][1] <= 1
    lines = metrics(tmp_path / "a")
    assert "val" not in lines[-1] and set(lines[-1]["clients"]) == {"d15", "d30", "d45", "d60", "d75"}
    assert result["curve"]["round"] == [1, 2] and len(result["curve"]["d0 0.5"]) == 2
    assert not (tmp_path / "a" / "best.pt").exists() and (tmp_path / "a" / "curves.png").exists()
    several = run_here("fedgala", tmp_path / "b", "--sources", "d0,d15,d30")
    assert set(several["last"]["linear"]) == {"d45", "d60", "d75"} and set(metrics(tmp_path / "b")[0]["clients"]) == {"d0", "d15", "d30"}
    one = run_here("fedgala", tmp_path / "c", "--sources", "d0,d15,d30", "--target", "d60")
    assert one["last"]["linear"] == {"d60": several["last"]["linear"]["d60"]}  # the same training, the same classifier
    assert one["bytes"]["up_per_round"] == 3 * sum(v.numel() * v.element_size() for v in common.tensors_of(
        torch.load(tmp_path / "c" / "checkpoint.pt", weights_only=True)["server"])) + 3 * 16


@pytest.mark.parametrize("flags, words", [
    (("--sources", "d0,d1"), "--sources d1 is not a domain of digits; its domains are d0, d15"),
    (("--sources", "d0,d15", "--target", "d0"), "leaves no target"),
    (("--sources", "d0,d0"), "leaves no target"),
    (("--target", "x"), "--target x is not a domain"),
    (("--label-ratio", "10"), "expected shares between 0 and 1"),
    (("--label-ratio", "0.1/0.1"), "expected shares between 0 and 1"),
    (("--label-ratio", "0.99", "--target", "d0"), "none of which is left to test"),
    (("--protocol", "lodo"), "invalid choice"),
    (("--tau", "2"), "--tau is 2.0; it must be a finite number"),
    (("--ga-iterations", "0"), "--ga-iterations is 0"),
    (("--queue", "0"), "--queue is 0"),
    (("--ssl", "swav"), "invalid choice"),
    (("--crop", "4"), "--crop is 4"),
    (("--normalize", "imagenet", "--target", "d0"), "is for colour images"),
    (("--backbone", "smallcnn", "--crop", "9", "--target", "d0"), "images of at least 10x10"),
])
def test_bad_flags(tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as end:
        run_here("fedgala", tmp_path / "run", *flags)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(lines) == 1 and words in lines[0], lines


# FedEMA


def test_fedema_mixes_by_divergence():
    """mu_k is the autoscaler's share the first time and min(lambda_k d_k, 1) from then on; the predictor is mixed with the same
    share, BN's statistics are the global ones."""
    for kind in ("conv-mean", "full"):
        args, server, (client, _), net = federation("baselines.fedema", "--divergence", kind, "--autoscale", "0.6")
        rounds(args, server, [client], 1)
        assert "mu" not in client.log
        scale = None
        for t, size in ((1, 0.01), (2, 0.5), (3, 20.0)):
            own, start = copy.deepcopy(client.own), copy.deepcopy(client.start)
            w = {n: v + size * torch.randn_like(v) if v.is_floating_point() else v for n, v in server.w.items()}
            names = [n for n in own if n.startswith("f.") and (kind == "full" or own[n].ndim == 4)]
            if kind == "full":
                d = math.sqrt(sum(float((w[n].double() - own[n].double()).square().sum()) for n in names))
            else:
                d = np.mean([float((start[n].double() - own[n].double()).norm()) for n in names])
            scale = 0.6 / d if scale is None else scale
            mu = min(scale * d, 1)
            client.net.load_state_dict(w | client.target)
            client.mix(net, w)
            assert float(client.mu) == pytest.approx(mu, rel=1e-4)
            for n, p in net.named_parameters():
                if fedema.travels(n):
                    torch.testing.assert_close(p.double(), (1 - mu) * w[n].double() + mu * own[n].double(), atol=1e-5, rtol=1e-4)
            assert all(torch.equal(v, w[n]) for n, v in net.named_buffers() if fedema.travels(n))
            client.train({"w": w}, t)
            assert float(client.scale) == pytest.approx(scale, rel=1e-4)
        assert kind != "full" or float(client.mu) == 1


def test_fedema_without_mixing_is_fedbyol(tmp_path):
    a = run_here("baselines.fedema", tmp_path / "a", "--autoscale", "0", "--target", "d0", "--rounds", "3")
    b = run_here("fedgala", tmp_path / "b", "--ssl", "byol", "--predictor", "shared", "--local-alignment", "off",
                 "--no-global-alignment", "--target", "d0", "--rounds", "3")
    losses = [[c["loss"] for line in metrics(tmp_path / x) for c in line["clients"].values()] for x in "ab"]
    assert losses[0] == losses[1] and a["last"] == b["last"]
    assert a["logs"]["mu"] == [None, 0, 0]


def test_fedema_goes_on(tmp_path, monkeypatch):
    flags = ("--target", "d0", "--rounds", "4", "--checkpoint-every", "0")
    run_here("baselines.fedema", tmp_path / "whole", *flags)
    interrupted("baselines.fedema", monkeypatch, tmp_path / "cut", *flags, after=2)
    run_here("baselines.fedema", tmp_path / "cut", *flags)
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
