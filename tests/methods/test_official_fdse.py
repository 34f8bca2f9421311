"""official.fdse against the released code, both versions: three clients and two rounds on small inputs.

fixtures/fdse.json has what the classes of WwZzz/FDSE_CVPR25 (dd266a2: first, c0bd90b: official) gave for the
weights and images made here: the outputs of their blocks, L_Con of each step, and, of each tensor that the
server held after a round, its sum and its product with other numbers.
"""


import official.fdse
from tests.conftest import ROOT, members_of, parsed, read_json
from tests.methods.test_fdse import mib, multiply_adds

import pytest
import torch

FIXTURES = read_json(ROOT / "tests" / "fixtures" / "fdse.json")
FLAGS = ("--lambda", 3.0, "--beta", 0.4, "--tau", 0.2, "--lr", 0.1, "--clip", 0.8, "--weight-decay", 0.02,
         "--precision", "fp32", "--device", "cpu")


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


def variant_args(variant):
    return parsed("official.fdse", "--variant", variant, *FLAGS)


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

    def batches(data, args, t, k):
        return [batch(t, k, step) for step in range(2)]
    monkeypatch.setattr(official.fdse, "batches", batches)
    data, _ = members_of(args)
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
    """All tensors but the counters, which the official code adds up; in float32, which processors round in
    their own ways."""
    assert {name for name in tensors if "num_batches" not in name} == set(want)
    for name, numbers in want.items():
        size = tensors[name].abs().sum()
        assert summary(tensors[name]) == pytest.approx(numbers, rel=1e-3, abs=1e-4 * float(1 + size)), name


@pytest.mark.parametrize("flags", [("--image-size", 160), ("--pad",)])
def test_images_that_are_too_small_without_padding(flags):
    """At laptop scale DomainNet has 64 pixels, which the official network cannot take (bad_inputs.csv)."""
    args = parsed("official.fdse", "--dataset", "domainnet10", "--scale", "laptop", *flags)
    net = official.fdse.build(args, 3, 10).eval()
    assert net(torch.zeros(1, 3, args.image_size, args.image_size)).isfinite().all()


@pytest.mark.parametrize("variant,size,flops", [("first", 24.87, 2.219), ("official", 24.86, 1.675)])
def test_table4_of_the_versions(variant, size, flops):
    """Table 4 says 24.87 MiB and 2.24e10 multiply-adds: the first version has both."""
    args = parsed("official.fdse", "--dataset", "officecaltech", "--variant", variant)
    net = official.fdse.build(args, 3, 10)
    assert round(mib(net), 2) == size
    assert round(multiply_adds(net) / 1e10, 3) == flops


@pytest.mark.parametrize("variant", ["paper", "official", "first"])
@pytest.mark.parametrize("scale", ["paper", "laptop", "smoke"])
def test_networks_take_the_images_of_every_scale(scale, variant):
    """Shape of the logits, and that they are finite; of the paper's variant the network is fdse.py's."""
    args = parsed("official.fdse", "--dataset", "officecaltech", "--scale", scale, "--variant", variant)
    logits = official.fdse.build(args, 3, 10).eval()(torch.zeros(1, 3, args.image_size, args.image_size))
    assert logits.shape == (1, 10) and logits.isfinite().all()
