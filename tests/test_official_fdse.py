"""official.fdse against the released code, both versions: three clients and two rounds on small inputs.

fixtures/fdse.json has what the classes of WwZzz/FDSE_CVPR25 (dd266a2: first, c0bd90b: official) gave for the
weights and images made here: the outputs of their blocks, L_Con of each step, and, of each tensor that the
server held after a round, its sum and its product with other numbers.
"""

import json
import math
from pathlib import Path

import common
import fdse
import official.fdse
from tests.conftest import fails
from tests.test_fdse import mib, multiply_adds

import pytest
import torch

FIXTURES = json.loads((Path(__file__).parent / "fixtures" / "fdse.json").read_text())
COEFFICIENTS = {"lambda": 3.0, "beta": 0.4, "tau": 0.2, "lr": 0.1, "clip": 0.8, "weight-decay": 0.02}


def made(shape, seed):
    """Numbers in [-0.5, 0.5) that need no random generator."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    numbers = (i * i * 7919 + i * 104729 + seed * 15485863) % 10007
    return (numbers.double() / 10007 - 0.5).float().view(shape)


def fill(tensors):
    """Made weights and statistics for {name: tensor}, named as in fdse.py; biases are not 0."""
    for seed, name in enumerate(sorted(tensors)):
        value = tensors[name]
        if "num_batches" in name:
            continue
        numbers = made(value.shape, seed)
        if name.endswith("running_var") or (".bn_" in name and name.endswith("weight")):
            numbers = 1 + 0.8 * numbers
        elif value.dim() > 1:
            numbers = numbers * (12 / value[0].numel()) ** 0.5
        value.copy_(numbers)


def batch(t, k, step):
    """Images [6, 1, 12, 12] of client k, of other brightness than its neighbour's, and their classes."""
    seed = 100 * t + 10 * k + step
    x = made((6, 1, 12, 12), seed) * (1 + 0.5 * k) + 0.5 + 0.2 * k
    return x, (torch.arange(6) * 3 + seed) % 10


def summary(value):
    """A tensor in two numbers."""
    flat = value.detach().double().flatten()
    return [float(flat.sum()), float(flat @ made(flat.shape, 1).double())]


def block_input(linear):
    return made((5, 6), 3) if linear else made((2, 3, 5, 5), 3)


def parsed(*flags):
    return official.fdse.arguments([str(flag) for flag in flags])


def variant_args(variant):
    flags = []
    for name, value in COEFFICIENTS.items():
        flags += [f"--{name}", value]
    return parsed("--variant", variant, "--precision", "fp32", "--device", "cpu", *flags)


@pytest.mark.parametrize("variant", ["first", "official"])
@pytest.mark.parametrize("linear", [False, True])
def test_outputs_of_the_official_blocks(variant, linear):
    """Against stored outputs of the authors' blocks with the same weights, both versions."""
    args = variant_args(variant)
    if linear:
        block = official.fdse.Block(args, 6, 8)
    else:
        block = official.fdse.Block(args, 3, 7, 3, 1, 1)
    fill(block.state_dict())
    out = block.train()(block_input(linear))
    want = torch.tensor(FIXTURES[variant]["linear" if linear else "conv"])
    torch.testing.assert_close(out.flatten(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", ["first", "official"])
def test_two_rounds_of_the_official_code(variant, monkeypatch):
    """Local training with L_Con from the second round on, clipping and weight decay; min-norm aggregation and
    mixing of the DSE modules, tensor by tensor; BN statistics."""
    args = variant_args(variant)
    net = official.fdse.build(args, 1, 10)
    fill(net.state_dict())
    monkeypatch.setattr(fdse, "batches", lambda data, args, t, k: [batch(t, k, step) for step in range(2)])
    data, _ = common.split(common.open_dataset(args), args)
    server = official.fdse.Server(args, net, 3)
    clients = [official.fdse.Client(args, net, k, data[k]) for k in range(3)]
    for t, want in enumerate(FIXTURES[variant]["rounds"]):
        uploads, l_con = {}, []
        for k, client in enumerate(clients):
            uploads[k] = client.train(server.download(k), t)
            l_con.append(float(client.log.get("consistency", 0)))
        server.update(uploads, t)
        assert l_con == pytest.approx(want["l_con"], rel=1e-3)
        compare(server.u | server.bn_dfe, want["shared"])
        for k in range(3):
            compare(server.v[k], want["own"][k])
            compare(clients[k].bn_dse, want["kept"][k])


def compare(tensors, want):
    """All tensors but the counters, which the official code adds up."""
    assert {name for name in tensors if "num_batches" not in name} == set(want)
    for name, numbers in want.items():
        size = tensors[name].abs().sum()
        assert summary(tensors[name]) == pytest.approx(numbers, rel=1e-4, abs=2e-5 * float(1 + size)), name


def official_by_hand(batch, glob, beta, times):
    """The official code's loss in plain Python, of the last of `times` times the same batch."""
    weights = [math.exp(beta * i) for i in range(len(batch))]
    f = v = None
    for _ in range(times):
        loss = 0.0
        for i, (means, _) in enumerate(batch):
            m = float(means.mean())
            s = float(means.var())
            if f is None:
                f, v = m, s
            else:
                f = 0.9 * f + 0.1 * m
                v = 0.9 * v + 0.1 * s
            mean_loss, variance_loss = [], []
            for a in glob[i][0].tolist():
                mean_loss.append((a * a - f * f) / (2 * v))
            for a in glob[i][1].tolist():
                variance_loss.append(0.5 * (math.log(v / (a + 1e-8)) + a / (v + 1e-8)))
            w = weights[i] / sum(weights)
            loss += w * sum(mean_loss) / len(mean_loss)
            loss += w * sum(variance_loss) / len(variance_loss)
    return loss


def test_official_loss_against_a_plain_transcription():
    """Against the loss written out in plain Python from c0bd90b's formula."""
    torch.manual_seed(0)
    batch, glob = [], []
    for channels in (5, 7):
        batch.append((torch.randn(channels), None))
        glob.append((torch.randn(channels), torch.rand(channels) + 0.5))
    _, hat = official.fdse.consistency_official(batch, glob, None, beta=0.3)
    loss, _ = official.fdse.consistency_official(batch, glob, hat, beta=0.3)
    want = official_by_hand(batch, glob, 0.3, times=2)
    assert math.isclose(loss.item(), want, rel_tol=1e-4)


def test_images_that_are_too_small_without_padding(capsys):
    """At laptop scale DomainNet has 64 pixels, which the official network cannot take."""
    laptop = ["--dataset", "domainnet10", "--variant", "official", "--scale", "laptop"]
    words = "images need 160 pixels, not 64: give --image-size 160, or --pad"
    fails(capsys, 2, words, official.fdse.arguments, laptop)
    for flags in (["--image-size", "160"], ["--pad"]):
        args = parsed(*laptop, *flags)
        net = official.fdse.build(args, 3, 10).eval()
        assert net(torch.zeros(1, 3, args.image_size, args.image_size)).isfinite().all()


def test_official_variant_sets_all_its_choices_and_a_flag_wins():
    args = parsed("--dataset", "officecaltech", "--beta", "0.2")
    assert (args.lambda_, args.beta) == (0.05, 0.2)
    assert (args.lr_decay, args.weight_decay) == (0.9998, 1e-3)
    assert args.image_size == 256
    assert (args.con_loss, args.con_from) == ("official", 1)
    assert (args.unit, args.evaluated) == ("tensor", "trained")
    assert not args.pad and not args.dse_relu and args.block_bias


def test_the_first_version_and_the_official_settings_of_domainnet():
    first = parsed("--dataset", "officecaltech", "--variant", "first")
    assert (first.lambda_, first.beta, first.tau) == (10.0, 0.5, 10.0)
    assert (first.con_loss, first.con_from, first.stem_padding) == ("first", 1, 5)
    assert first.block_bias and first.own_bias and first.dse_relu and first.pad and not first.fc_identity
    assert (first.unit, first.evaluated, first.weight_decay) == ("tensor", "trained", 1e-3)
    for variant, coefficients in (("first", (10.0, 0.5, 10.0)), ("official", (0.01, 0.1, 0.5))):
        args = parsed("--dataset", "domainnet10", "--variant", variant)
        assert (args.lr, args.epochs, args.image_size, args.lr_decay) == (0.1, 1, 256, 0.9998)
        assert (args.lambda_, args.beta, args.tau) == coefficients


@pytest.mark.parametrize("variant,size,flops", [("first", 24.87, 2.219), ("official", 24.86, 1.675)])
def test_table4_of_the_versions(variant, size, flops):
    """Table 4 says 24.87 MiB and 2.24e10 multiply-adds: the first version has both."""
    net = official.fdse.build(parsed("--dataset", "officecaltech", "--variant", variant), 3, 10)
    assert round(mib(net), 2) == size
    assert round(multiply_adds(net) / 1e10, 3) == flops


@pytest.mark.parametrize("variant", ["official", "first"])
@pytest.mark.parametrize("scale", ["paper", "laptop", "smoke"])
def test_networks_take_the_images_of_every_scale(scale, variant):
    args = parsed("--dataset", "officecaltech", "--scale", scale, "--variant", variant)
    logits = official.fdse.build(args, 3, 10).eval()(torch.zeros(1, 3, args.image_size, args.image_size))
    assert logits.shape == (1, 10) and logits.isfinite().all()


def test_the_variant_paper_is_the_papers_method():
    """The same network, bit for bit, and the same settings."""
    args = parsed("--variant", "paper", "--dataset", "officecaltech")
    same = fdse.arguments(["--dataset", "officecaltech"])
    assert all(getattr(args, name) == value for name, value in vars(same).items() if name != "origins")
    nets = []
    for module, settings in ((fdse, same), (official.fdse, args)):
        common.seed_all(0)
        nets.append(module.build(settings, 3, 10).state_dict())
    assert all(torch.equal(value, nets[1][name]) for name, value in nets[0].items())
