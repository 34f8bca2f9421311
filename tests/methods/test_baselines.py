"""What methods have in common: where each is FedAvg, what travels, the unseen client's model, and the two
that may project z."""

import common
import fedadg
import fedavg
import fedcir
import fedsr
from baselines import (centralized, ditto, fedbn, feddg_ga, feddyn, fedfa, fedgen, fedheal, fedopt, fedproc,
                       fedprox, lgfedavg, local, moon, partialfed, scaffold)
from plumbing.run.payloads import nbytes
from tests.conftest import parsed
from tests.plain_torch import body_of_smallcnn_bn, is_trained, linear
from tests.three_clients import FLAGS, ROUNDS, federation, one_round, same, three_clients

import pytest
import torch
from torch.testing import assert_close


def made(module, *flags, build=None):
    """The server and three clients of a method."""
    args = parsed(module.__name__, *FLAGS, *flags)
    return federation(module, args, build)[:2]


def play(server, clients, t: int, chosen: tuple[int, ...]) -> tuple[dict, dict]:
    """A round: what goes down to its first client, and what comes up from it."""
    down = server.download(chosen[0])
    return down, one_round(server, clients, t, chosen)[chosen[0]]


class Sampled(fedcir.GaussianNet):
    """A network whose features are a sample of z, for fedavg.py."""

    def features(self, x):
        mu, sigma = self.encode(x)
        return mu + sigma * torch.randn_like(mu)


def sampled(*of) -> Sampled:
    return Sampled(common.backbone(*of), 20)


UNIFORM = ("--average", "uniform")
# FedSR has the classifier in front of the encoder: the sum of squares in a norm has another last digit.
SMALLCNN = ("--backbone", "smallcnn", "--image-size", 16, "--momentum", 0.9, "--clip", 0)


@pytest.mark.parametrize("module,flags,of_fedavg", [
    (fedprox, ("--mu", 0), ()),
    (moon, ("--mu", 0), ()),
    (ditto, ("--augment", "crops"), ("--augment", "crops")),  # its global model
    (feddyn, ("--alpha", 0), UNIFORM),
    (fedheal, ("--tau", -1, "--beta", 0), UNIFORM),
    (feddg_ga, ("--step-size", 0), UNIFORM),
    (feddg_ga, ("--step-size", 0, "--rule", "code"), UNIFORM),
    (fedgen, ("--lambda-reg", 0, "--lambda-kd", 0), ()),
    (fedgen, ("--lambda-reg", 0, "--lambda-kd", 0, *UNIFORM), UNIFORM),
    (fedproc, ("--alpha", 0), ()),
    (fedproc, ("--alpha", 0, "--prototypes", "batches", *UNIFORM), UNIFORM),
    (partialfed, ("--strategy", "none"), ()),
    (lgfedavg, ("--shared", "all"), ()),
    (fedfa, ("--prob", 0), ()),  # whose layers have entries of their own
    (fedadg, ("--no-adversarial", "--smoothing", 0), UNIFORM),
    (fedsr, ("--variant", "fedavg", "--no-keep-momentum", *SMALLCNN), (*UNIFORM, *SMALLCNN)),
    (fedcir, ("--variant", "control"), UNIFORM),  # on the Gaussian network
    (fedcir, ("--variant", "fedreg", "--lambda-reg", 0), UNIFORM),
    (fedcir, ("--variant", "fedalign", "--lambda-align", 0), UNIFORM),
])
def test_a_setting_in_which_it_is_fedavg(module, flags, of_fedavg):
    """Bit for bit, over three rounds."""
    server, clients = made(module, *flags)
    other, others = made(fedavg, *of_fedavg, build=sampled if module is fedcir else None)
    for t, chosen in enumerate(ROUNDS):
        play(server, clients, t, chosen)
        play(other, others, t, chosen)
        w = server.w
        if module in (fedadg, fedsr):  # FedADG's F and C are in `net`; FedSR calls smallcnn's layer to z last
            w = {name.removeprefix("net.").replace("last.", "body.9."): v for name, v in w.items()}
        assert same({name: w[name] for name in other.w}, other.w)


@pytest.mark.parametrize("module,flags", [(centralized, ()), (local, ("--select", "last")), (scaffold, ())])
def test_of_one_client_it_is_fedavg_bit_for_bit(module, flags):
    """Without momentum, which FedAvg starts anew in each round."""
    models = []
    for method, own in ((module, flags), (fedavg, ())):
        args = parsed(method.__name__, *FLAGS, *own)
        data = three_clients(args)[:1]
        common.pool(data)
        common.seed_all(0)
        net = common.backbone(args, 1, 10)
        server, client = method.Server(args, net, 1), method.Client(args, net, 0, data[0])
        for t in range(3):
            one_round(server, [client], t, (0,))
        models.append(common.state(client.model(server.download(0))))
    assert same(*models)


def model_after(module, t: int, *flags, **held) -> dict:
    """The server's model after round t, before which it has had what is `held`."""
    server, clients = made(module, *flags)
    vars(server).update(held)
    one_round(server, clients, t)
    return server.w


def test_but_for_bn_fedbns_first_round_is_fedavgs():
    w = model_after(fedbn, 0)
    assert same(w, common.pick(model_after(fedavg, 0), list(w)))


def test_scaffold_clips_before_it_corrects():
    """A step is FedAvg's, and the rate times c more."""
    flags = ("--steps", 1, "--clip", 0.1)
    theirs = model_after(fedavg, 0, *UNIFORM, *flags)
    c = {name: torch.full_like(v, 0.5) for name, v in theirs.items() if is_trained(name)}
    w = model_after(scaffold, 0, *flags, c=c)
    for name in c:
        assert_close(w[name], theirs[name] - 0.05 * 0.5)


def test_an_image_without_a_prototype_has_l_ce_alone():
    prototypes = torch.eye(64)[:11] * (torch.arange(11) == 10)[:, None]  # of a class without images
    assert_close(model_after(fedproc, 1, prototypes=prototypes), model_after(fedavg, 1))


PARAMETERS = 320 + 2 * 32 + 18496 + 2 * 64 + 3136 * 64 + 64 + 64 * 10 + 10  # of the digits' network
OF_BN = 4 * 4 * (32 + 64) + 2 * 8  # four numbers a channel, and two counters
GENERATOR = 4 * (74 * 256 + 4 * 256 + 256 * 64 + 64) + 8 + 4 * 10  # and the shares of ten labels


@pytest.mark.parametrize("module,down,up", [
    (fedprox, 0, 0),
    (fedopt, 0, 0),
    (moon, 0, 0),
    (ditto, 0, 0),
    (partialfed, 0, 0),
    (feddyn, 0, -8),  # no number of images
    (fedheal, 0, -8),
    (feddg_ga, 0, 8),  # two errors instead of it
    (fedbn, -OF_BN, -OF_BN),
    (fedfa, 4 * 4 * (32 + 64), 4 * 4 * (32 + 64)),
    (scaffold, 4 * PARAMETERS, 4 * PARAMETERS - 8),
    (fedproc, 4 * 10 * 64, 4 * 10 * 64 + 8 * 10),
    (fedgen, GENERATOR, 8 * 10),
    (lgfedavg, 4 * 650 - 4 * PARAMETERS - 4 * 2 * (32 + 64) - 16, 4 * 650 - 4 * PARAMETERS - 4 * 2 * 96 - 16),
])
def test_what_travels(module, down, up):
    """Bytes more than FedAvg's in the second round."""
    payloads = {}
    for method in (module, fedavg):
        server, clients = made(method)
        play(server, clients, 0, (0, 1, 2))
        payloads[method] = [nbytes(payload) for payload in play(server, clients, 1, (0, 1, 2))]
    theirs = payloads[fedavg]
    assert payloads[module] == [theirs[0] + down, theirs[1] + up]


OF_GLOBAL_MODEL = (fedprox, moon, ditto, partialfed, feddyn, fedheal, feddg_ga, fedfa, scaffold, fedproc,
                   fedgen, fedopt)


@pytest.mark.parametrize("module", OF_GLOBAL_MODEL)
def test_the_unseen_client_has_the_global_model(module):
    server, clients = made(module)
    play(server, clients, 0, (0, 1))
    data = three_clients(clients[2].args)[2]
    data.unseen = True
    unseen = module.Client(clients[2].args, clients[2].net, 2, data)
    assert same(common.state(unseen.model(server.download(2))), server.w)


def test_what_moon_compares_with_is_in_evaluation_mode():
    _, clients = made(moon)
    net = clients[0].net.train()
    assert not moon.frozen(net, common.state(net)).training


@pytest.mark.parametrize("module", [moon, fedproc])
def test_projection(module):
    """z is the output of two more layers of D and 256 units, FedProc's of length 1; the classifier is on top
    of it."""
    server, clients = made(module, "--projection")
    net, x = clients[0].net, torch.rand(5, 1, 8, 8)
    w = common.state(net)
    inner = {name.replace("body.0.", "body."): v for name, v in w.items() if name.startswith("body.0.")}
    h = body_of_smallcnn_bn(x, inner, dict(inner))
    z = linear(linear(h, w, "body.1").clamp(min=0), w, "body.3")
    if module is fedproc:
        z = z / z.norm(dim=1, keepdim=True)
    assert_close(net.train()(x), linear(z, w, "head"))
    assert_close(net.features(x), z)
    assert z.shape == (5, 256) and (z < 0).any()
    up = clients[0].train(server.download(0), 0)
    assert module is moon or up["sums"].shape == server.prototypes.shape == (10, 256)
