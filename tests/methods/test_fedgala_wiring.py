"""FedGaLA's wiring: three rounds recomputed in plain torch and float64, with every coefficient away from its
neutral value and clipping active; and the functions of the official code on the same inputs."""

import copy
import math
import sys
from types import SimpleNamespace

import common
import fedgala
import official.fedgala
from tests.conftest import ROOT, members_of, metrics, parsed, read_json, run_here
from tests.plain_torch import State, adam_step, batch_norm, in_double, is_trained, leaves_of, linear
from tests.methods.test_fedgala import aligned_weights, unit

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.testing import assert_close

FLAGS = ("--target", "d75", "--precision", "fp32", "--device", "cpu", "--image-size", 8, "--crop", 8,
         "--epochs", 1, "--batch-size", 6, "--hidden", 7, "--dim", 5, "--queue", 10, "--temperature", 0.3,
         "--lr", 0.02, "--lr-decay", 0.7, "--weight-decay", 0.03, "--l2", 0.01, "--prox", 0.2, "--ema", 0.8,
         "--tau", 0.04)
ROUNDS = ((0, 1), (2, 0), (0, 1, 2))  # the clients of each round: 2 comes late, 1 misses one
SIZES = (24, 13, 19)  # their images: 4, 2 and 3 full batches


def with_flags(*flags):
    """The arguments of fedgala, or, if only it has the flags, of official.fedgala."""
    if {*flags}.isdisjoint(("--ga-unit", "--ga-vectors", "--predictor")):
        return parsed("fedgala", *flags)
    return parsed("official.fedgala", "--variant", "paper", *flags)


def method_of(args):
    return sys.modules[type(args).__module__]


def tiny(args) -> fedgala.Learner:
    """A learner whose encoder has one convolution."""
    common.seed_all(args.seed)
    body = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
                         nn.Flatten(), nn.Linear(3 * 8 * 8, 6))
    learner = fedgala.Learner(common.Net(body, 6, 10), args)
    if getattr(args, "predictor", "local") == "shared":
        learner.travels = ("f.", "g.", "q.")
    return learner


def three_clients(args) -> list[common.ClientData]:
    members, _ = members_of(args)
    for member, size in zip(members, SIZES):
        member.train.index, member.train.labels = member.train.index[:size], member.train.labels[:size]
    return members[:3]


# The client by hand


def project(x: Tensor, leaves: State, state: State, at: str = "") -> Tensor:
    """g(f(x)), or with `at` "target." g'(f'(x)), in training mode."""
    h = conv2d(x, leaves[f"{at}f.0.weight"], padding=1)
    h = batch_norm(h, leaves, state, f"{at}f.1").clamp(min=0)
    return two_layers(linear(h.flatten(1), leaves, f"{at}f.4"), leaves, state, f"{at}g")


def two_layers(z: Tensor, leaves: State, state: State, name: str) -> Tensor:
    h = batch_norm(z @ leaves[f"{name}.0.weight"].T, leaves, state, f"{name}.1").clamp(min=0)
    return linear(h, leaves, f"{name}.3")


def aim(x: Tensor, state: State) -> Tensor:
    return unit(project(x, state, state, "target."))


def loss_by_hand(ssl: str, x1: Tensor, x2: Tensor, leaves: State, state: State, tau: float) -> Tensor:
    """The learner's loss; MoCo's new keys are put into `state`."""
    if ssl == "simclr":
        z = unit(project(torch.cat([x1, x2]), leaves, state))
        terms = []
        for i in range(len(z)):
            others = [j for j in range(len(z)) if j != i]
            partner = (i + len(x1)) % len(z)
            logits = z[others] @ z[i] / tau
            terms.append(logits.exp().sum().log() - z[partner] @ z[i] / tau)
        return torch.stack(terms).mean()
    if ssl == "moco":
        state["keys"] = aim(x2, state)
        query = unit(project(x1, leaves, state))
        terms = []
        for q, k in zip(query, state["keys"]):
            logits = torch.cat([(q @ k)[None], state["queue"] @ q]) / tau
            terms.append(logits.exp().sum().log() - logits[0])
        return torch.stack(terms).mean()
    z1 = project(x1, leaves, state)
    if ssl == "byol":
        p1 = unit(two_layers(z1, leaves, state, "q"))
        first = (p1 - aim(x2, state)).square().sum(1).mean()
        p2 = unit(two_layers(project(x2, leaves, state), leaves, state, "q"))
        return first + (p2 - aim(x1, state)).square().sum(1).mean()
    z2 = project(x2, leaves, state)
    p1 = unit(two_layers(z1, leaves, state, "q"))
    p2 = unit(two_layers(z2, leaves, state, "q"))
    return -((p1 * unit(z2.detach())).sum(1).mean() + (p2 * unit(z1.detach())).sum(1).mean()) / 2


def groups_of(names: list[str], kind: str) -> list[list[str]]:
    """All names together, those of a module together, or each by itself."""
    if kind == "model":
        return [names]
    together = {}
    for name in names:
        key = name if kind == "tensor" else name[:name.rindex(".")]
        together.setdefault(key, []).append(name)
    return list(together.values())


class ClientByHand:
    """Lines 14-25 with E = 1, from the model w; its own parts, moments and last global model stay here."""

    def __init__(self, args, data, k: int, own: State):
        self.args, self.data, self.k, self.own = args, data, k, own
        self.before, self.kept = None, {}
        self.norms, self.margins = [], []

    def train(self, w: State, t: int) -> tuple[State, float]:
        """What is uploaded, and the mean loss; `share` is that of discarded gradients."""
        args = self.args
        state = w | self.own
        common.seed_all(args.seed, "train", t, self.k)
        first = self.before is None
        if first and args.ssl in ("byol", "moco"):
            for name in w:
                if not name.startswith("q."):
                    state[f"target.{name}"] = w[name]
        if first and args.ssl == "moco":
            state["queue"] = unit(torch.randn(args.queue, args.dim)).double()
        if not args.keep_optimizer:
            self.kept = {}
        losses, shares = [], []
        for x, _ in common.batches(self.data.train, args, t, self.k):
            x1, x2 = x.double().chunk(2)
            leaves = leaves_of({name: v for name, v in state.items() if name[:2] in ("f.", "g.", "q.")})
            loss = loss_by_hand(args.ssl, x1, x2, leaves, state, args.temperature)
            losses.append(float(loss.detach()))
            for name, v in leaves.items():
                loss = loss + args.l2 * v.square().sum()
                if name in w:
                    loss = loss + args.prox * (v - w[name]).square().sum()
            gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
            self.norms.append(norm)
            for name in gradients:
                gradients[name] = gradients[name] * min(1, args.clip / norm)
            if not first and args.local_alignment != "off":
                shares.append(self.align(gradients, w))
            for name, g in gradients.items():
                if g is not None:
                    state[name] = self.step(name, state[name], g + args.weight_decay * state[name], t)
            self.follow(state)
        self.before = w
        state.pop("keys", None)
        self.own = {name: v for name, v in state.items() if name not in w}
        self.share = sum(shares) / len(shares) if shares else None
        return {name: state[name] for name in w}, sum(losses) / len(losses)

    def align(self, gradients: State, w: State) -> float:
        """Lines 17-23; a gradient that is skipped becomes None."""
        args = self.args
        groups = groups_of([name for name in gradients if name in w], args.align_unit)
        bad = 0
        for names in groups:
            g = torch.cat([gradients[n].flatten() for n in names])
            change = torch.cat([(w[n] - self.before[n]).flatten() for n in names])
            if not change.any():  # no client has moved it: it has no direction
                continue
            cosine = float(g @ change / g.norm() / change.norm())
            if args.alignment_sign == "descent":
                cosine = -cosine
            self.margins.append(abs(cosine - args.tau))
            if cosine > args.tau:
                continue
            bad += 1
            for n in names:
                if args.local_alignment == "reweight":
                    gradients[n] = args.reweight_factor * gradients[n]
                else:
                    gradients[n] = None
        return bad / len(groups)

    def step(self, name: str, v: Tensor, g: Tensor, t: int) -> Tensor:
        lr = self.args.lr * self.args.lr_decay ** t
        if self.args.optimizer == "sgd":
            self.kept[name] = self.args.momentum * self.kept.get(name, 0) + g
            return v - lr * self.kept[name]
        return v - lr * adam_step(self.kept, name, g)

    def follow(self, state: State) -> None:
        """The target network and the queue after a step."""
        args = self.args
        if args.ssl not in ("byol", "moco"):
            return
        for name in state:
            if name.startswith("target.") and is_trained(name):
                state[name] = args.ema * state[name] + (1 - args.ema) * state[name[len("target."):]]
        if args.ssl == "moco":
            queue, place = state["queue"].clone(), int(state["position"])
            for key in state["keys"]:
                queue[place] = key
                place = (place + 1) % args.queue
            state["queue"], state["position"] = queue, torch.tensor(float(place), dtype=torch.float64)


# The server by hand


def server_by_hand(args, before: State, models: list[State], images: list[int],
                   full_batches: list[int]) -> State:
    """Lines 4-12, the updates added to Theta as printed."""
    counts = {"samples": images, "batches": full_batches, "uniform": [1] * len(models)}[args.average]
    p = [count / sum(counts) for count in counts]
    new = {}
    for names in groups_of(list(before), getattr(args, "ga_unit", "model")):
        weights = p
        if args.global_alignment:
            compared = [n for n in names if is_trained(n)] or [n for n in names if "num_batches" not in n]
            if compared:
                weights = weights_by_hand(args, before, models, compared, p)
        for n in names:
            update = sum(weight * (model[n] - before[n]) for weight, model in zip(weights, models))
            new[n] = before[n] + update
            if "num_batches" in n:
                new[n] = new[n].round()
    return new


def weights_by_hand(args, before: State, models: list[State], compared: list[str],
                    p: list[float]) -> list[float]:
    """Lines 5-11."""
    updates = [torch.cat([(model[n] - before[n]).flatten() for n in compared]) for model in models]
    weights = p
    if getattr(args, "ga_vectors", "updates") == "scaled":
        updates = [share * update for share, update in zip(p, updates)]
        weights = [1 / len(models)] * len(models)
    for _ in range(args.ga_iterations):
        mean = sum(weight * update for weight, update in zip(weights, updates))
        raw = [(float(u @ mean / u.norm() / mean.norm()) + 1) / 2 for u in updates]
        weights = [value / sum(raw) for value in raw]
    return weights


@pytest.mark.parametrize("clip, flags", [
    (6, ("--ssl", "simclr", "--ga-iterations", 2)),
    (6, ("--ssl", "simclr", "--alignment-sign", "descent", "--tau", -0.3, "--align-unit", "tensor",
           "--ga-unit", "layer", "--average", "uniform")),
    (14, ("--ssl", "simclr", "--optimizer", "sgd", "--momentum", 0.6, "--local-alignment", "reweight",
           "--reweight-factor", 0.3, "--no-keep-optimizer", "--ga-unit", "tensor", "--ga-vectors", "scaled",
           "--average", "batches")),
    (9, ("--ssl", "moco", "--momentum", 0.7, "--alignment-sign", "descent", "--average", "batches")),
    (18, ("--ssl", "byol", "--lr", 0.004, "--momentum", 0.7, "--no-global-alignment")),
    (18, ("--ssl", "byol", "--lr", 0.004, "--predictor", "shared", "--momentum", 0.5,
          "--ga-vectors", "scaled")),
    (5, ("--ssl", "simsiam", "--momentum", 0.7, "--local-alignment", "off", "--ga-unit", "layer")),
])
def test_rounds_by_hand(clip, flags):
    """Uploads, what stays on the clients, what is logged, and the server's model, after each round. No cosine
    is near tau, some gradients are clipped and some layers discarded."""
    args = with_flags(*FLAGS, "--clip", clip, *flags)
    net, data = tiny(args), three_clients(args)
    server, clients = started(method_of(args), args, net, data)
    assert ("q.0.weight" in server.w) == ("--predictor" in flags)
    hands = [ClientByHand(args, data[k], k, in_double(clients[k].own)) for k in range(3)]
    w, shares = in_double(server.w), []
    atol = 1e-4
    if args.optimizer == "adam":
        atol = 1e-3  # its first steps are as long where a gradient is nearly rounding
    for t, chosen in enumerate(ROUNDS):
        models = play(server, clients, hands, t, w, atol)
        for k in chosen:
            assert_close(in_double(clients[k].own), hands[k].own, atol=atol, rtol=1e-3)
            if hands[k].share is None:
                assert "discarded" not in clients[k].log
            else:
                assert float(clients[k].log["discarded"]) == pytest.approx(hands[k].share)
                shares.append(hands[k].share)
        w = server_by_hand(args, w, models, [SIZES[k] for k in chosen], [SIZES[k] // 6 for k in chosen])
        assert_close(in_double(server.w), w, atol=atol, rtol=1e-3)
    norms = sum((hand.norms for hand in hands), [])
    margins = sum((hand.margins for hand in hands), [])
    assert min(norms) < clip < max(norms)
    if args.local_alignment != "off":
        assert len(shares) == 4 and 0 < min(shares) and max(shares) < 1
        assert min(margins) > 2e-4


def started(method, args, net, data) -> tuple:
    """The server and the clients; what is sent is not what the clients were made with."""
    server = method.Server(args, net, 3)
    clients = [method.Client(args, net, k, data[k]) for k in range(3)]
    for name in server.w:
        if is_trained(name):
            server.w[name] = 1.1 * server.w[name]
    return server, clients


def play(server, clients, hands, t: int, w: State, atol: float) -> list[State]:
    """A round of the method and by hand: the models by hand."""
    uploads, models = {}, []
    for k in ROUNDS[t]:
        common.seed_all(server.args.seed, "train", t, k)
        uploads[k] = clients[k].train(copy.deepcopy(server.download(k)), t)
        model, loss = hands[k].train(w, t)
        assert_close(in_double(uploads[k]["w"]), model, atol=atol, rtol=1e-3)
        assert_close(float(clients[k].log["loss"]), loss, atol=1e-5, rtol=1e-4)
        counts = {name: int(v) for name, v in uploads[k].items() if name != "w"}
        expected = {"n": SIZES[k], "batches": SIZES[k] // 6}
        assert counts == {name: expected[name] for name in counts} and "n" in counts
        models.append(model)
    server.update(uploads, t)
    return models


def test_what_no_client_changed_stays_to_the_last_bit():
    """The rounding of an average would be a direction for line 18."""
    for flags in ((), ("--no-global-alignment",), ("--ga-unit", "tensor")):
        args = with_flags(*FLAGS, *flags)
        server = method_of(args).Server(args, tiny(args), 3)
        uploads = {}
        for k in range(3):
            moved = {name: v + 0.1 * torch.randn(v.shape) for name, v in server.w.items() if "f.4" in name}
            uploads[k] = {"w": server.w | moved, "n": torch.tensor(SIZES[k]), "batches": torch.tensor(k + 2)}
        before = server.w
        server.update(uploads, 0)
        for name, v in before.items():
            assert torch.equal(server.w[name], v) == ("f.4" not in name)


# The official code


OFFICIAL = read_json(ROOT / "tests" / "fixtures" / "fedgala.json")


def wave(*shape: int, start: float = 0.0) -> Tensor:
    """sin(start + 1), sin(start + 2), ... in a shape: the inputs with which the fixtures were made."""
    n = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return torch.sin(start + n).float().view(shape)


def waves(tensors: State, start: float = 0.0) -> State:
    """A state of sines, the same as in the official networks, whose entries have the same order by name."""
    names = sorted(name for name in tensors if "num_batches" not in name)
    filled = dict(tensors)
    for i, name in enumerate(names):
        values = wave(*tensors[name].shape, start=start + 7 * i)
        filled[name] = values.abs() + 0.5 if "running_var" in name else 0.5 * values
    return filled


def views(i: int) -> Tensor:
    """The two views of batch i, [8, 1, 3, 4]."""
    return torch.cat([wave(4, 1, 3, 4, start=100 * i), wave(4, 1, 3, 4, start=100 * i + 50)])


def same(tensors: State, expected: dict[str, list[float]], atol: float = 2e-5) -> None:
    """All entries of the fixture, and no other ones but counters."""
    named = {name for name in tensors if "num_batches" not in name}
    assert named == set(expected)
    for name, values in expected.items():
        assert_close(tensors[name].flatten(), torch.tensor(values), atol=atol, rtol=1e-4)


def official_learner(*flags):
    """(args, learner, server, one client) with the network of the fixtures."""
    args = with_flags("--target", "d75", "--precision", "fp32", "--hidden", 6, "--dim", 4, "--lr", 0.01,
                      "--temperature", 0.07, "--align-unit", "tensor", "--ga-unit", "tensor",
                      "--ga-vectors", "scaled", *flags)
    body = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU())
    net = fedgala.Learner(common.Net(body, 5, 10), args)
    net.load_state_dict(waves(net.state_dict()))
    data = SimpleNamespace(train=range(12))
    return args, net, official.fedgala.Server(args, net, 3), fedgala.Client(args, net, 0, data)


def test_losses_are_the_official_codes():
    """Stored outputs of the authors' `info_nce_loss` and `byol_loss_fn`, to 1e-5."""
    assert float(fedgala.nt_xent(wave(8, 6), 0.07)) == pytest.approx(OFFICIAL["info_nce_loss"], rel=1e-5)
    of_rows = OFFICIAL["byol_loss_fn"]
    ours = float(fedgala.regression(wave(4, 6), wave(4, 6, start=50)))
    assert ours == pytest.approx(sum(of_rows) / len(of_rows), rel=1e-5)


@pytest.mark.parametrize("case, tau", [
    ("client_update", 0),
    ("client_update_tau", 0.2),
    ("client_update_off", 0),
])
def test_local_alignment_is_the_official_codes(case, tau, monkeypatch):
    """`client_update` of SimCLR with Adam and `client_gm` la, three batches: the printed sign."""
    args, _, server, client = official_learner("--tau", tau)
    order = sorted(name for name in server.w if "num_batches" not in name)
    if case != "client_update_off":
        for name, v in server.w.items():
            if name in order:
                client.before[name] = v - wave(*v.shape, start=31 * order.index(name))
    monkeypatch.setattr(fedgala, "batches", lambda *_: [(views(i), None) for i in (1, 2, 3)])
    up = client.train(server.download(0), 1)
    of_authors, atol = OFFICIAL[case]["state"], 2e-5
    if case == "client_update_off":
        # The first gradient of this entry is 0 but for rounding: Adam's step goes where the processor rounds
        # to. The other entries feel that by less than a tenth of a step.
        up["w"]["f.2.bias"][0], atol = of_authors["f.2.bias"][0], 1e-3
    same(up["w"], of_authors, atol)
    if case != "client_update_off":
        assert 100 * float(client.log["discarded"]) == pytest.approx(OFFICIAL[case]["discard_rate"], abs=0.01)


@pytest.mark.parametrize("function, flags", [
    ("Aggregation_by_Alignment", ()),
    ("federated_averaging", ("--no-global-alignment",)),
])
def test_the_server_is_the_official_codes(function, flags):
    """Each tensor has its own weights, BN's statistics too; the p_i are 0.5, 0.3 and 0.2."""
    _, _, server, _ = official_learner("--average", "batches", *flags)
    uploads = {}
    for k, batches in enumerate((5, 3, 2)):
        w = waves(server.w, start=10 * k + 1)
        uploads[k] = {"w": w, "n": torch.tensor(99), "batches": torch.tensor(batches)}
    server.update(uploads, 1)
    same(server.w, OFFICIAL[function])


def test_aligned_weights_are_the_official_codes():
    """Stored outputs of the authors' `Global_Alignment`, to 1e-5."""
    g = [row + 0.4 for row in wave(4, 9)]
    p = torch.full((4,), 0.25, dtype=torch.float64)
    for weights in (aligned_weights, official.fedgala.aligned_weights):
        assert weights(g, p, 3).tolist() == pytest.approx(OFFICIAL["Global_Alignment"], rel=1e-5)


def test_moco_is_the_official_codes():
    """Three steps with its linear projector: losses, the queue around its end, the position."""
    _, net, _, _ = official_learner("--ssl", "moco", "--queue", 8, "--ema", 0.9)
    net.g = nn.Linear(5, 4)
    online = {name: v for name, v in net.state_dict().items() if name.startswith(("f.", "g."))}
    net.load_state_dict(waves(online), strict=False)
    net.target = nn.ModuleDict(copy.deepcopy({"f": net.f, "g": net.g})).requires_grad_(False)
    queue = wave(8, 4, start=5)
    net.queue.copy_(queue / queue.norm(dim=1, keepdim=True))
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    net.train()
    for i, expected in zip((1, 2, 3), OFFICIAL["MoCo"]["losses"]):
        loss = net.loss(*views(i).chunk(2))
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
        opt.zero_grad()
        loss.backward()
        opt.step()
        net.after_step()
    assert_close(net.queue.flatten(), torch.tensor(OFFICIAL["MoCo"]["queue"]), atol=1e-5, rtol=1e-4)
    assert int(net.position) == OFFICIAL["MoCo"]["position"]


def test_a_new_sgd_whose_first_gradients_are_discarded(tmp_path):
    """Their momentum is then 0; without one PyTorch's fused SGD stops."""
    flags = ["--no-keep-optimizer", "--optimizer", "sgd", "--target", "d0", "--linear-epochs", 2]
    run_here("fedgala", tmp_path, *flags, "--rounds", 4)
    assert any(0 < client["discarded"] < 1 for client in metrics(tmp_path)[-1]["clients"].values())
