"""fedgala.py and baselines/fedema.py against independent calculations, most of them in float64."""

import copy
import dataclasses
import math

import common
import fedgala
from baselines import fedema
from plumbing import linear
from reproduce.cells import cells_of
from reproduce.records import Records
from reproduce.tables import Block, Column, Row, Table
from tests.conftest import PROGRAMS, fails, interrupted, metrics, one_run, parsed, run_here

import numpy as np
import pytest
import torch
from torch import Tensor, tensor
from torch.nn.functional import conv2d, normalize
from torch.testing import assert_close

SMALL = ("--limit", "48", "--batch-size", "8", "--hidden", "16", "--dim", "8", "--precision", "fp32",
         "--target", "d75")


def federation(method: str, *flags, K=2):
    """(args, server, K clients, net) on a few digits."""
    module = PROGRAMS[method]
    args = parsed(method, *SMALL, *flags)
    domains, classes = common.load_domains(args)
    members, _ = common.split(common.Dataset(domains, classes), args)
    common.seed_all(args.seed, "init")
    net = module.build(args, 1, len(classes)).to(memory_format=torch.channels_last)
    server = module.Server(args, net, K)
    clients = [module.Client(args, net, k, members[k]) for k in range(K)]
    return args, server, clients, net


def rounds(args, server, clients, T: int) -> list[dict]:
    """T rounds as the loop does them; returns the downloads."""
    downs = []
    for t in range(T):
        uploads = {}
        for client in clients:
            down = server.download(client.k)
            common.seed_all(args.seed, "train", t, client.k)
            uploads[client.k] = client.train(down, t)
        downs.append(down["w"])
        server.update(uploads, t)
    return downs


def parts_of(names) -> set[str]:
    """The parts of a learner to which entries of its state belong: f, g, q, target, queue, position."""
    return {name.split(".")[0] for name in names}


def layer_of(name: str) -> str:
    """f.conv1 of f.conv1.weight and f.conv1.bias."""
    return name.rpartition(".")[0]


def unit(v: Tensor) -> Tensor:
    """The rows of v at length 1."""
    return v / v.norm(dim=1, keepdim=True)


def two_views(n: int = 6) -> tuple[Tensor, Tensor]:
    """Two views of n images."""
    return torch.rand(n, 1, 28, 28), torch.rand(n, 1, 28, 28)


def in_float64(tensors: dict) -> dict:
    """A copy of a state in float64."""
    return {name: v.detach().to(torch.float64, copy=True) for name, v in tensors.items()}


def noisy(tensors: dict, size: float) -> dict:
    """A state with Gaussian noise of a size on all but the counters."""
    changed = dict(tensors)
    for name, v in tensors.items():
        if v.is_floating_point():
            changed[name] = v + size * torch.randn_like(v)
    return changed


def weights_p(*p: float) -> Tensor:
    return tensor(p, dtype=torch.float64)


# Learners


def test_nt_xent():
    """SimCLR, Eq. (1), pair by pair."""
    z, tau, B = torch.randn(10, 6, dtype=torch.float64), 0.3, 5
    similar = (unit(z) @ unit(z).T / tau).exp().tolist()
    terms = []
    for i in range(2 * B):
        j = (i + B) % (2 * B)
        others = 0.0
        for k in range(2 * B):
            if k != i:
                others += similar[i][k]
        terms.append(-math.log(similar[i][j] / others))
    expected = pytest.approx(np.mean(terms), rel=1e-5)
    assert float(fedgala.nt_xent(z, tau)) == expected


def test_info_nce():
    """MoCo, Eq. (1): the own key against the queue alone, not against the batch's other keys."""
    q, k = torch.randn(2, 4, 5).double()
    queue, tau = normalize(torch.randn(7, 5)), 0.2
    terms = []
    for a, b in zip(unit(q), unit(k)):
        own = math.exp(float(a @ b) / tau)
        old = 0.0
        for n in queue.double():
            old += math.exp(float(a @ n) / tau)
        terms.append(-math.log(own / (own + old)))
    expected = pytest.approx(np.mean(terms), rel=1e-5)
    assert float(fedgala.info_nce(q, k, queue, tau)) == expected


def test_moco_queue_and_momentum():
    """Keys take the places of the oldest ones around the end of the queue; the key encoder moves by 1 - m;
    keys have no gradient."""
    _, _, _, net = federation("fedgala", "--ssl", "moco", "--queue", "10", "--ema", "0.9")
    net.begin()
    net.train()
    trained = [*net.f.parameters(), *net.g.parameters()]
    old = net.queue.clone()
    for turn in range(3):  # 4 keys each: places 0-3, 4-7, 8-9 and 0-1
        net.loss(*two_views(4)).backward()
        assert not net.keys.requires_grad
        assert all(p.grad is None for p in net.target.parameters())
        keys = unit(net.keys.double())
        before = [p.clone() for p in net.target.parameters()]
        with torch.no_grad():
            for p in net.g.parameters():
                p.add_(0.1)
        net.after_step()
        places = [(4 * turn + i) % 10 for i in range(4)]
        assert_close(net.queue[places].double(), keys, atol=1e-6, rtol=0)
        if turn == 0:
            assert torch.equal(net.queue[4:], old[4:])
        for was, now, p in zip(before, net.target.parameters(), trained):
            assert_close(now, 0.9 * was + 0.1 * p, atol=1e-6, rtol=1e-5)
    assert int(net.position) == 2
    net.loss(*two_views(23))  # more keys than places: the newest ten stay
    newest = normalize(net.keys[13:])
    net.after_step()
    assert int(net.position) == 5
    assert_close(net.queue.roll(-5, 0), newest)


def test_similarities_are_float32_under_autocast():
    """Bit for bit: the losses with and without autocast."""
    z, queue = torch.randn(6, 4), normalize(torch.randn(5, 4))

    def losses() -> list[Tensor]:
        return [fedgala.nt_xent(z, 0.1), fedgala.info_nce(z, z + 0.1, queue, 0.1)]

    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = losses()
    assert under_autocast == losses()


def test_byol_loss():
    """BYOL, Eq. (2), both ways, against the target network, which has no gradient."""
    _, _, _, net = federation("fedgala", "--ssl", "byol")
    net.train()
    x1, x2 = two_views()

    def one_way(x: Tensor, other: Tensor) -> Tensor:
        p = unit(net.q(net.g(net.f(x))))
        z = unit(net.target["g"](net.target["f"](other)))
        return (p - z).square().sum(1).mean()

    loss = net.loss(x1, x2)
    assert_close(loss, one_way(x1, x2) + one_way(x2, x1), atol=1e-5, rtol=1e-5)
    loss.backward()
    assert all(v.grad is None for v in net.target.parameters())
    assert all(v.grad is not None for v in net.q.parameters())


def test_simsiam_loss():
    """SimSiam, Eqs. (1)-(4), whose gradient takes the other branch as a constant: finite differences of the
    loss with that branch frozen."""
    _, _, _, net = federation("fedgala", "--ssl", "simsiam")
    net.double().train()
    x1, x2 = torch.stack(two_views()).double()
    z1 = unit(net.project(x1)).detach()
    z2 = unit(net.project(x2)).detach()

    @torch.no_grad()
    def with_frozen() -> float:
        one_way = unit(net.q(net.project(x1))) * z2
        other_way = unit(net.q(net.project(x2))) * z1
        return -float(one_way.sum(1).mean() + other_way.sum(1).mean()) / 2

    loss = net.loss(x1, x2)
    loss.backward()
    assert loss.item() == pytest.approx(with_frozen(), abs=1e-6)
    weight, h = net.g[3].weight, 1e-5
    for i, j in ((0, 0), (3, 7)):
        with torch.no_grad():
            weight[i, j] += h
            up = with_frozen()
            weight[i, j] -= 2 * h
            down = with_frozen()
            weight[i, j] += h
        expected = pytest.approx((up - down) / (2 * h), rel=1e-3, abs=1e-6)
        assert float(weight.grad[i, j]) == expected


KEEPS = {"simclr": set(), "moco": {"target", "queue", "position"}, "byol": {"q", "target"}, "simsiam": {"q"}}


@pytest.mark.parametrize("ssl", fedgala.LEARNERS)
def test_what_a_learner_keeps_and_sends(ssl):
    """Only encoder and projector travel; predictor, target network and queue are each client's own."""
    args, server, clients, _ = federation("fedgala", "--ssl", ssl)
    client, other = clients
    assert parts_of(server.download(0)["w"]) == {"f", "g"}
    start = copy.deepcopy(other.own)
    rounds(args, server, [client], 2)
    assert parts_of(client.own) == KEEPS[ssl]
    for n, v in other.own.items():
        assert torch.equal(v, start[n])  # one client has not touched the other's
    for part in KEEPS[ssl]:
        kept = [n for n in start if n.startswith(part)]
        assert not all(torch.equal(client.own[n], start[n]) for n in kept), part
    flags = ("--variant", "paper", "--ssl", ssl, "--predictor", "shared")
    _, shared, _, _ = federation("official.fedgala", *flags)
    sent = parts_of(shared.download(0)["w"])
    assert ("q" in sent) == (ssl in ("byol", "simsiam"))


def test_the_target_network_starts_from_the_received_one_and_stays():
    flags = ("--ssl", "byol", "--steps", "1", "--ema", "1", "--local-alignment", "off")
    args, server, (client, _), net = federation("fedgala", *flags)
    received = {}
    for n, v in server.w.items():
        received[n] = torch.full_like(v, 0.01) if v.is_floating_point() else v
    doubled = {n: v * 2 for n, v in received.items()}
    client.train({"w": received}, 0)
    for turn in (1, 2):
        for n, _ in net.named_parameters():
            if n in received:
                assert torch.equal(client.own["target." + n], received[n]), turn
        client.train({"w": doubled}, 1)  # with m = 1 the target never moves


# Local alignment


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
    tensors = fedgala.units(names, "tensor")
    layers = fedgala.units(names, "layer")
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


def test_a_cosine_at_tau_is_unaligned():
    """Line 19 as printed keeps what is above tau alone."""
    across = {"a.weight": tensor([0.0, 1.0])}
    change = {"a.weight": tensor([1.0, 0.0])}
    layers = [["a.weight"]]
    assert fedgala.unaligned(across, change, layers, 0, "paper").tolist() == [True]
    assert fedgala.unaligned(across, change, layers, -1e-6, "paper").tolist() == [False]


def test_the_reference_is_the_last_change_of_the_global_model(monkeypatch):
    """Line 18; none in the first round, and never for what stays on the client."""
    args, server, clients, _ = federation("fedgala", "--ssl", "byol", "--steps", "2")
    seen = []

    def align(client, theta_i, g_est):
        seen.append((client.k, g_est))
        return tensor(0.0)

    monkeypatch.setattr(fedgala.Client, "align", align)
    downs = rounds(args, server, clients, 3)
    assert [k for k, _ in seen] == [0, 0, 1, 1] * 2  # rounds 2 and 3
    for i, (_, g_est) in enumerate(seen):
        t = 1 + i // 4
        assert parts_of(g_est) == {"f", "g"}
        now, last = downs[t], downs[t - 1]
        for n, v in g_est.items():
            assert "running" not in n
            assert torch.equal(v, now[n] - last[n])


@pytest.mark.parametrize("flags", [
    (),
    ("--discard", "zero"),
    ("--local-alignment", "reweight", "--reweight-factor", "0.01"),
    ("--align-unit", "tensor"),
    ("--alignment-sign", "descent"),
])
def test_what_happens_to_a_discarded_gradient(flags, monkeypatch):
    """One step of round 2 against a float64 Adam written out here: a skipped tensor keeps its value, its
    moments and its step count; a zero gradient lets the moments decay and the tensor move on; a reweighted
    one enters with its factor."""
    args, server, (client, _), net = federation("fedgala", "--steps", "1", *flags)
    rounds(args, server, [client], 1)
    gradients = {}
    align = client.align

    def spy(theta_i, g_est):
        for n, p in theta_i.items():
            gradients[n] = p.grad.double().clone()
        return align(theta_i, g_est)

    monkeypatch.setattr(client, "align", spy)
    w, before = in_float64(server.w), in_float64(client.before)
    opt = copy.deepcopy(client.opt)
    change = {n: w[n] - before[n] for n, _ in net.named_parameters()}
    common.seed_all(args.seed, "train", 1, 0)
    after = in_float64(client.train(server.download(0), 1)["w"])

    groups = [[n] for n in change]
    if args.align_unit == "layer":
        groups = list(common.group_by(list(change), layer_of).values())
    skipped = args.local_alignment == "discard" and args.discard == "skip"
    dropped = 0
    for names in groups:
        g = torch.cat([gradients[n].flatten() for n in names])
        d = torch.cat([change[n].flatten() for n in names])
        cosine = float(g @ d / (g.norm() * d.norm()))
        if args.alignment_sign == "descent":
            cosine = -cosine
        factor = 1.0
        if cosine <= 0:
            dropped += 1
            factor = {"discard": 0.0, "reweight": args.reweight_factor}[args.local_alignment]
        for n in names:
            if cosine <= 0 and skipped:
                assert torch.equal(after[n], w[n])
                for key, v in opt[n].items():
                    assert torch.equal(client.opt[n][key], v)
            else:
                g = factor * gradients[n]
                expected, step = adam_by_hand(w[n], opt[n], g, args.lr)
                assert_close(after[n], expected, atol=2e-6, rtol=1e-4)
                assert float(client.opt[n]["step"]) == step
    assert 0 < dropped < len(groups)
    share = dropped / len(groups)
    assert float(client.log["discarded"]) == pytest.approx(share)


def adam_by_hand(w: Tensor, kept: dict[str, Tensor], g: Tensor, lr: float) -> tuple[Tensor, float]:
    """w after one step of Adam along the gradient g, and the number of steps; float64."""
    step = float(kept["step"]) + 1
    m = 0.9 * kept["exp_avg"].double() + 0.1 * g
    v = 0.999 * kept["exp_avg_sq"].double() + 0.001 * g ** 2
    m = m / (1 - 0.9 ** step)
    v = v / (1 - 0.999 ** step)
    return w - lr * m / (v.sqrt() + 1e-8), step


def test_regularizers():
    """Eqs. (54)-(56): what they add to each parameter's gradient is lambda 2 Theta_i, and mu 2 (Theta_i
    - Theta_g)."""
    (plain1, plain2), _ = steps_of_sgd()
    (l2, _), _ = steps_of_sgd("--l2", "0.5")
    (prox1, prox2), start = steps_of_sgd("--prox", "0.5")
    furthest = 0.0
    for n, (theta, g) in plain1.items():
        _, with_l2 = l2[n]
        assert_close(with_l2, g + 2 * 0.5 * theta, atol=1e-5, rtol=1e-4)
        _, with_prox = prox1[n]
        assert_close(with_prox, g, atol=1e-6, rtol=1e-5)  # Theta_i is still Theta_g
        theta, with_prox = prox2[n]  # so that after one step both runs are at the same place
        _, g = plain2[n]
        moved = theta - start[n]
        assert_close(with_prox, g + 2 * 0.5 * moved, atol=1e-5, rtol=1e-3)
        furthest = max(furthest, float(moved.abs().max()))
    assert furthest > 1e-3


def steps_of_sgd(*flags) -> tuple[list[dict], dict]:
    """Two steps of MoCo by plain SGD: before each step {parameter: (value, gradient)}, and the model
    received; float64."""
    usual = ("--ssl", "moco", "--steps", "2", "--momentum", "0", "--weight-decay", "0", "--lr", "0.1",
             "--local-alignment", "off")
    _, server, (client, _), net = federation("fedgala", *usual, *flags)
    steps, step = [], torch.optim.SGD.step

    def spy(opt, *rest, **how):
        trained = {n: p for n, p in net.named_parameters() if p.grad is not None}
        values = in_float64(trained)
        gradients = in_float64({n: p.grad for n, p in trained.items()})
        steps.append({n: (values[n], gradients[n]) for n in trained})
        return step(opt, *rest, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", spy)
        common.seed_all(0, "train", 0, 0)
        client.train(server.download(0), 0)
    return steps, in_float64(server.w)


# Global alignment


def by_products(g: list[Tensor], w: list[float], iterations: int) -> list[float]:
    """Lines 7-11 by the products of the updates alone: with G_ij = <g_i, g_j> the mean update's product
    with g_i is (G w)_i, and its square w G w."""
    rows = torch.stack(g).double().numpy()
    G = rows @ rows.T
    w = np.array(w)
    for _ in range(iterations):
        norms = np.sqrt(np.diag(G) * (w @ G @ w))
        w = (G @ w / norms + 1) / 2
        w = w / w.sum()
    return w.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_aligned_weights(dtype):
    """The result of line 10 goes back into line 8; sums are float64 whatever the updates are."""
    g = list(torch.randn(4, 30, dtype=dtype) + 0.3)
    p = [0.4, 0.3, 0.2, 0.1]
    weights = {}
    for iterations in (1, 2, 3):
        w = fedgala.aligned_weights(g, weights_p(*p), iterations).tolist()
        assert w == pytest.approx(by_products(g, p, iterations), abs=1e-8)
        weights[iterations] = w
    assert weights[1] != pytest.approx(weights[2], abs=1e-6)


def test_aligned_weights_by_hand():
    """Weights of opposed, orthogonal, equal and unmoved clients, on paper."""
    def after_one(g: list[Tensor], *p: float):
        return pytest.approx(fedgala.aligned_weights(g, weights_p(*p), 1).tolist())

    opposed = [tensor([1.0, 0.0]), tensor([-1.0, 0.0])]  # the heavier one is the mean's direction
    assert [1, 0] == after_one(opposed, 0.7, 0.3)
    right_angle = [tensor([3.0, 0.0]), tensor([0.0, 4.0])]  # their mean is (1.5, 2): cosines 0.6 and 0.8
    assert [0.8 / 1.7, 0.9 / 1.7] == after_one(right_angle, 0.5, 0.5)
    same = [torch.ones(3), torch.ones(3)]
    assert [0.5, 0.5] == after_one(same, 0.9, 0.1)
    one_still = [torch.zeros(2), tensor([1.0, 0.0])]  # no update has no direction: cosine 0
    assert [1 / 3, 2 / 3] == after_one(one_still, 0.5, 0.5)


SHARES = {
    "samples": [1 / 6, 2 / 6, 3 / 6],
    "uniform": [1 / 3, 1 / 3, 1 / 3],
    "batches": [3 / 6, 2 / 6, 1 / 6],
}


@pytest.mark.parametrize("method,flags", [
    ("fedgala", ()),
    ("fedgala", ("--average", "uniform")),
    ("fedgala", ("--average", "batches")),
    ("fedgala", ("--ga-iterations", "1")),
    ("fedgala", ("--no-global-alignment",)),
    ("official.fedgala", ("--variant", "paper", "--ga-unit", "layer")),
    ("official.fedgala", ("--variant", "paper", "--ga-unit", "tensor")),
    ("official.fedgala", ("--variant", "paper", "--ga-vectors", "scaled")),
    ("official.fedgala", ("--variant", "paper", "--ga-vectors", "scaled", "--ga-unit", "tensor")),
])
def test_the_servers_update(method, flags):
    """Lines 4-12 in float64, parameters and BN's statistics."""
    args, server, _, net = federation(method, *flags)
    before, models, uploads = in_float64(server.w), [], {}
    for k in range(3):
        w = noisy(server.w, 0.1)
        models.append(in_float64(w))
        uploads[k] = {"w": w, "n": tensor(10 * (k + 1)), "batches": tensor(3 - k)}
    server.update(uploads, 0)
    parameters = [n for n, _ in net.named_parameters()]
    for name in before:
        if "num_batches" in name:
            continue
        w = SHARES[args.average]
        if args.global_alignment:
            names = compared(name, getattr(args, "ga_unit", "model"), parameters)
            start = common.flatten([before[n] for n in names])
            updates = []
            for theta in models:
                updates.append(common.flatten([theta[n] for n in names]) - start)
            if getattr(args, "ga_vectors", "updates") == "scaled":
                updates = [p * update for p, update in zip(w, updates)]
                w = SHARES["uniform"]
            w = by_products(updates, w, args.ga_iterations)
        expected = sum(p * theta[name] for p, theta in zip(w, models))
        assert_close(server.w[name].double(), expected, atol=1e-5, rtol=1e-5)


def compared(name: str, unit_name: str, parameters: list[str]) -> list[str]:
    """The entries whose updates decide the weights of entry `name`."""
    if unit_name == "model":
        return parameters
    if unit_name == "tensor":
        return [name]
    return [n for n in parameters if layer_of(n) == layer_of(name)]


PLAIN = ("--variant", "paper", "--local-alignment", "off", "--no-global-alignment", "--predictor", "shared")


@pytest.mark.parametrize("ssl", ["simclr", "simsiam"])
def test_without_alignment_it_is_the_plain_federated_learner(ssl):
    """Three rounds of a federated learner written out here: the same weights."""
    flags = ("--ssl", ssl, "--epochs", "2", *PLAIN)
    args, server, clients, _ = federation("official.fedgala", *flags)
    _, plain, _, net = federation("official.fedgala", *flags)
    w, kept = plain.w, [{}, {}]
    for t in range(3):
        after = []
        for k, client in enumerate(clients):
            net.load_state_dict(w, strict=False)
            net.train()
            named = dict(net.named_parameters())
            opt = plain_optimizer(ssl, named)
            for n, s in kept[k].items():
                opt.state[named[n]] = copy.deepcopy(s)
            common.seed_all(args.seed, "train", t, k)
            for x, _ in common.batches(client.data.train, args, t, k):
                opt.zero_grad()
                plain_loss(ssl, net, x).backward()
                opt.step()
            kept[k] = {n: dict(opt.state[p]) for n, p in named.items()}
            after.append(in_float64(net.state_dict()))
        mean = mean_by_images(after, clients)
        w = {n: mean[n].to(v.dtype) for n, v in plain.w.items()}
    rounds(args, server, clients, 3)
    for n, v in w.items():
        atol = 2e-4 if "running" in n or ssl == "simclr" else 1e-5
        assert_close(server.w[n], v, atol=atol, rtol=1e-3)


def mean_by_images(models: list[dict], clients) -> dict[str, Tensor]:
    """FedAvg, written out; counters are rounded."""
    images = [len(client.data.train) for client in clients]
    mean = {}
    for name in models[0]:
        total = sum(n * model[name] for n, model in zip(images, models))
        mean[name] = total / sum(images)
        if "num_batches" in name:
            mean[name] = mean[name].round()
    return mean


def plain_optimizer(ssl: str, named: dict):
    """App. B.3; Adam at the rate of the digits."""
    if ssl == "simclr":
        return torch.optim.Adam(named.values(), 1e-3, fused=True)
    return torch.optim.SGD(named.values(), 0.03, momentum=0.9, weight_decay=3e-4, fused=True)


def plain_loss(ssl: str, net, x: Tensor) -> Tensor:
    """The loss of SimCLR or SimSiam for eight images, x [16, C, H, W]."""
    if ssl == "simclr":
        z = unit(net.g(net.f(x)))
        itself = torch.eye(16, dtype=bool)
        logits = (z @ z.T / 0.2).masked_fill(itself, -1e9)
        i = torch.arange(16)
        return -logits.log_softmax(1)[i, (i + 8) % 16].mean()
    z1 = net.g(net.f(x[:8]))
    z2 = net.g(net.f(x[8:]))
    one_way = unit(net.q(z1)) * unit(z2.detach())
    other_way = unit(net.q(z2)) * unit(z1.detach())
    return -(one_way.sum(1).mean() + other_way.sum(1).mean()) / 2


# Settings, runs


def values(method: str, names: str, *flags) -> list:
    """The values of settings, by their names, with some flags."""
    args = parsed(method, *flags)
    return [getattr(args, name) for name in names.split()]


OPTIMIZER = "optimizer lr momentum weight_decay"
PACS = ("--dataset", "pacs")


def test_settings_are_the_papers():
    backbone = values("fedgala", "backbone crop rounds epochs batch_size hidden dim", *PACS)
    assert backbone == ["resnet18_3x3", 32, 100, 7, 128, 4096, 2048]
    assert values("fedgala", "tau ga_iterations alignment_sign", *PACS) == [0, 3, "paper"]
    assert values("fedgala", "label_ratio linear_lr linear_epochs", *PACS) == ["0.1/0.3", 3e-3, 100]
    assert values("fedgala", OPTIMIZER, *PACS) == ["adam", 3e-3, 0, 0]
    assert values("fedgala", OPTIMIZER, *PACS, "--ssl", "moco") == ["sgd", 0.025, 0.9, 3e-4]
    assert values("fedgala", OPTIMIZER, *PACS, "--ssl", "byol") == ["sgd", 0.03, 0.9, 3e-4]
    assert values("fedgala", OPTIMIZER, *PACS, "--ssl", "simsiam") == ["sgd", 0.03, 0.9, 3e-4]
    assert parsed("fedgala", "--dataset", "domainnet20").sources == "painting,real,sketch"
    assert values("baselines.fedema", OPTIMIZER, *PACS) == ["sgd", 0.03, 0.9, 3e-4]
    assert values("baselines.fedema", "autoscale rounds", *PACS) == [0.7, 100]


def test_settings_that_follow_from_the_learner():
    """A flag wins over them; they win over the defaults. At laptop scale Adam's rate is smaller."""
    assert values("fedgala", "lr", "--ssl", "byol", "--lr", "0.5") == [0.5]
    byol_with_adam = values("fedgala", OPTIMIZER, *PACS, "--ssl", "byol", "--optimizer", "adam")
    assert byol_with_adam == ["adam", 3e-3, 0, 0]
    laptop = parsed("fedgala", *PACS, "--scale", "laptop")
    assert (laptop.lr, laptop.origins["lr"]) == (3e-4, "derived")
    assert values("fedgala", "lr", "--scale", "laptop") == [1e-3]  # of the digits there is no laptop scale
    assert values("fedgala", "lr", *PACS, "--scale", "laptop", "--ssl", "moco") == [0.025]


def test_settings_are_the_official_codes():
    official = (*PACS, "--ssl")
    assert values("official.fedgala", OPTIMIZER, *official, "simclr") == ["adam", 1e-4, 0, 0]
    assert values("official.fedgala", OPTIMIZER, *official, "moco") == ["sgd", 0.03, 0.9, 1e-4]
    assert values("official.fedgala", "ema queue", *official, "moco") == [0.999, 65536]
    assert values("official.fedgala", OPTIMIZER, *official, "byol") == ["sgd", 0.03, 0.9, 1e-4]
    assert values("official.fedgala", "ema predictor", *official, "byol") == [1, "local"]
    assert values("official.fedgala", OPTIMIZER, *official, "simsiam") == ["sgd", 0.025, 0.9, 1e-4]
    assert values("official.fedgala", "ema predictor", *official, "simsiam") == [0.99, "shared"]
    names = "average align_unit ga_unit ga_vectors probe linear_lr"
    of_all = values("official.fedgala", names, *official, "simclr")
    assert of_all == ["batches", "tensor", "tensor", "scaled", "projector", 1e-4]


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


def test_the_last_small_batch_is_left_out():
    args = parsed("fedgala", "--batch-size", "20", "--epochs", "3")

    def sizes(n: int, args) -> list[int]:
        return [len(part) for part in common.cut_batches(torch.arange(n), args)]

    assert sizes(48, args) == [20, 20]
    assert sizes(12, args) == [12]
    assert sizes(48, dataclasses.replace(args, drop_last=False)) == [20, 20, 8]
    assert common.images_in_round(48, args) == 120


@pytest.mark.parametrize("ssl", ["simclr", "byol", "simsiam"])  # moco: tests/test_every_method.py
def test_a_run_goes_on_with_what_its_learner_keeps(tmp_path, ssl, monkeypatch):
    flags = (*one_run("fedgala"), "--ssl", ssl, "--rounds", "4", "--checkpoint-every", "0", "--queue", "24")
    whole = run_here("fedgala", tmp_path / "whole", *flags)
    interrupted("fedgala", monkeypatch, tmp_path / "cut", *flags, after=2)
    again = run_here("fedgala", tmp_path / "cut", *flags)
    of_both = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("cut", "whole")]
    assert of_both[0] == of_both[1]
    assert again["last"] == whole["last"] == whole["best"]
    assert again["logs"] == whole["logs"]


def test_a_linear_run_and_its_result(tmp_path):
    """Accuracies for each share of labels; no validation."""
    result = run_here("fedgala", tmp_path, "--target", "d0", "--label-ratio", "0.2/0.5", figures=True)
    last = result["last"]
    accuracies = last["linear"]["d0"]
    assert set(accuracies) == {"0.2", "0.5"}
    assert last["target"] == accuracies["0.2"]
    first, second = metrics(tmp_path)
    assert "val" not in second
    assert list(second["clients"]) == ["d15", "d30", "d45", "d60", "d75"]
    assert all("discarded" not in log for log in first["clients"].values())
    shares = [log["discarded"] for log in second["clients"].values()]
    assert result["logs"]["discarded"] == [None, pytest.approx(np.mean(shares))]
    assert 0 < min(shares) and max(shares) < 1
    assert result["start"] == first["start"] and "start" not in second
    assert set(result["start"]["linear"]["d0"]) == {"0.2", "0.5"}
    assert result["start"]["chance_loss"] == pytest.approx(math.log(2 * 16 - 1))
    assert result["curve"]["round"] == [1, 2]
    assert len(result["curve"]["d0 0.5"]) == 2
    assert not (tmp_path / "best.pt").exists()
    assert (tmp_path / "curves.png").exists()


def test_the_untrained_network():
    """What the start of a run evaluates: the first network, whose BN has the plain mean over the batches of
    each client's first epoch, averaged by images; and chance, when all features are alike."""
    args, _, _, _ = federation("fedgala", "--epochs", "1")
    dataset = common.open_dataset(args)
    fed = common.federation(fedgala.Server, fedgala.Client, args, fedgala.build, dataset)
    found = linear.evaluate_start(fed, common.representations, common.batches)
    w = fed.server.w
    by_client = []
    for k in range(5):
        client = fed.clients[k]
        common.seed_all(args.seed, "start", k)
        means = []
        for x, _ in common.batches(client.data.train, args, 0, k):
            means.append(conv2d(x, w["f.0.weight"], w["f.0.bias"], padding=1).mean((0, 2, 3)))
        by_client.append(torch.stack(means).mean(0))
    target = fed.clients[5]
    model = target.model(fed.server.download(5))
    statistics = {}
    for k in range(5):
        common.seed_all(args.seed, "start", k)
        epoch = common.batches(fed.clients[k].data.train, args, 0, k)
        of_client = linear.batch_statistics(model, epoch, args)
        assert_close(of_client["f.1.running_mean"], by_client[k], atol=1e-5, rtol=1e-4)
        for name, v in of_client.items():
            statistics[name] = statistics.get(name, 0) + v / 5
    model = target.model(fed.server.download(5))
    assert all(layer.momentum == 0.1 for layer in (model.f[1], model.g[1]))
    model.load_state_dict(statistics, strict=False)
    z, y = common.representations(model, target.data.test, args)
    seed = common.seed_all(args.seed, "linear", "d75").initial_seed()
    expected = linear.accuracies(z, y, 10, args, seed)["0.1"]
    assert found["linear"]["d75"]["0.1"] == pytest.approx(expected, abs=0.05)
    assert found["chance_loss"] == pytest.approx(float(fedgala.nt_xent(torch.ones(16, 3), args.temperature)))


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


def test_a_row_of_the_untrained_network_is_of_its_start(tmp_path):
    """tables/fedgala-1.toml: start = true."""
    path = tmp_path / "runs.jsonl"
    result = run_here("fedgala", tmp_path / "run", "--target", "d0", "--record", path)
    row = Row("untrained network", [[]], "fedgala", start=True, ours=True)
    block = Block("digits", "digits", [Column("10%", "last/linear/d0/0.1")], [row], flags="--target d0")
    table = Table("fedgala-1", "", "fedgala", "", [block])
    cell, = cells_of(table, block, row, Records(path), "smoke", [0])
    assert cell.values == {0: 100 * result["start"]["linear"]["d0"]["0.1"]}
    assert not cell.missing


def test_a_run_on_fixed_sources_evaluates_all_other_domains(tmp_path):
    sources = ("--sources", "d0,d15,d30")
    several = run_here("fedgala", tmp_path / "several", *sources)
    accuracies = several["last"]["linear"]
    assert list(accuracies) == ["d45", "d60", "d75"]
    first_round = metrics(tmp_path / "several")[0]
    assert list(first_round["clients"]) == ["d0", "d15", "d30"]
    one = run_here("fedgala", tmp_path / "one", *sources, "--target", "d60")
    assert one["last"]["linear"] == {"d60": accuracies["d60"]}  # the same training, the same classifier
    saved = torch.load(tmp_path / "one" / "checkpoint.pt", weights_only=True)
    of_one = common.nbytes(saved["server"]) + 16  # and the numbers of images and of batches
    assert one["bytes"]["up_per_round"] == 3 * of_one


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
    (("--backbone", "smallcnn", "--crop", "9", "--target", "d0"), "needs images of at least"),
])
def test_fedgala_bad_flags(tmp_path, capsys, flags, words):
    fails(capsys, 2, words, run_here, "fedgala", tmp_path / "run", *flags)


# FedEMA


@pytest.mark.parametrize("kind", ["conv-mean", "full"])
def test_fedema_mixes_by_divergence(kind):
    """mu_k is the autoscaler's share the first time and min(lambda_k d_k, 1) from then on; the predictor is
    mixed with the same share, BN's statistics are the global ones."""
    flags = ("--divergence", kind, "--autoscale", "0.6")
    args, server, (client, _), net = federation("baselines.fedema", *flags)
    rounds(args, server, [client], 1)
    assert "mu" not in client.log
    scale = None
    for t, size in ((1, 0.01), (2, 0.5), (3, 20.0)):
        own, start = copy.deepcopy(client.own), copy.deepcopy(client.start)
        w = noisy(server.w, size)
        d = divergence_by_hand(kind, own, start, w)
        if scale is None:
            scale = 0.6 / d
        mu = min(scale * d, 1)
        client.model({"w": w})
        assert float(client.mix(net, w)) == pytest.approx(mu, rel=1e-4)
        theirs, ours = in_float64(w), in_float64(own)
        for n, p in net.named_parameters():
            if fedema.travels(n):
                mixed = (1 - mu) * theirs[n] + mu * ours[n]
                assert_close(p.double(), mixed, atol=1e-5, rtol=1e-4)
        for n, v in net.named_buffers():
            if fedema.travels(n):
                assert torch.equal(v, w[n])
        client.train({"w": w}, t)
        assert float(client.scale) == pytest.approx(scale, rel=1e-4)
    if kind == "full":
        assert float(client.log["mu"]) == 1


def divergence_by_hand(kind: str, own: dict, start: dict, w: dict) -> float:
    """d_k: of the encoder from the global one, or how far the last round moved the convolutions."""
    squares, norms = [], []
    for n, v in own.items():
        if n.startswith("f."):
            squares.append(float((w[n] - v).double().square().sum()))
            if v.ndim == 4:
                norms.append(float((start[n] - v).double().norm()))
    if kind == "full":
        return math.sqrt(sum(squares))
    return np.mean(norms)


def test_fedema_keeps_lambda_in_its_state():
    """As its checkpoints have it: none before the first mixture, and the same number after a resume."""
    args, server, clients, _ = federation("baselines.fedema")
    client, other = clients
    assert common.kept(client)["scale"] is None
    rounds(args, server, clients, 2)
    saved = common.kept(client)
    assert set(saved) == {"target", "own", "start", "scale", "opt"}
    assert client.scale > 0 and client.scale != other.scale
    common.restore(other, saved, "cpu")
    assert client.scale == other.scale


def test_fedema_without_mixing_is_fedbyol(tmp_path):
    flags = (*one_run("fedgala"), "--rounds", "3")
    a = run_here("baselines.fedema", tmp_path / "a", "--autoscale", "0", *flags)
    b = run_here("official.fedgala", tmp_path / "b", "--ssl", "byol", *PLAIN, *flags)
    for mine, theirs in zip(metrics(tmp_path / "a"), metrics(tmp_path / "b")):
        for name, log in mine["clients"].items():
            assert log["loss"] == theirs["clients"][name]["loss"]
    assert a["last"] == b["last"]
    assert a["logs"]["mu"] == [None, 0, 0]
