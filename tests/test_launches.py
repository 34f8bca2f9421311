"""What a round asks of a device: few kernels around its steps, none of the host's numbers within them."""

import contextlib
import importlib
import json

import common
import fedavg
from bench import launches
from plumbing.tensors import as_vector, copied, entrywise, parts_of
from reproduce.methods import modules
from tests.conftest import fails, parsed

import pytest
import torch
from torch import Tensor, tensor

READS = {"fedgala": 1}  # which layers are skipped: a gradient is there or not, and the host decides that


def check(name: str, found: launches.Launches) -> None:
    assert found.share <= 0.05, found
    assert found.copies <= 1, found  # of the augmentation, for which the host does not wait
    assert found.reads == READS.get(name, 0), found


def test_fedavg():
    found = launches.launches_of("fedavg")
    check("fedavg", found)
    assert found.steps > 100 * launches.STEPS and found.around < 200


@pytest.mark.slow
@pytest.mark.parametrize("name", modules())
def test_each_method(name):
    check(name, launches.launches_of(name))


class Reading(fedavg.Client):
    """Looks at its loss in each batch, and sends a number of the host."""

    def train(self, down, t):
        module = importlib.import_module("fedavg")
        for x, _ in module.batches(self.data.train, self.args, t, self.k):
            float(self.model(down)(x).detach().sum())
            torch.ones(3).to(x.device)
        return super().train(down, t)


def test_reads_and_copies_are_noticed(monkeypatch):
    monkeypatch.setattr(fedavg, "Client", Reading)
    copies, reads = launches.transfers_of_a_batch(fedavg)
    assert (copies, reads) == (1.5, 0.5)  # its batches, and as many of FedAvg's


def test_what_counts_as_a_kernel():
    with launches.Kernels() as counted:
        x = torch.ones(3, 4)  # 1
        x.view(12)[2:].t()  # views
        torch.empty(3)
        with counted.part("steps"):
            torch._foreach_add_([x] * 100, 1.0)  # 3 of 48
    assert counted.count == {"loop": 1, "steps": 3}


def test_the_command(tmp_path, capsys, monkeypatch):
    made = launches.Launches(steps=90, own=5, around=5, parts={"loop": 5}, copies=1.0, reads=0.0)
    monkeypatch.setattr(launches, "launches_of", lambda name: made)
    launches.main(["--only", "fedavg", "--out", str(tmp_path / "l.json")])
    assert "5.0%" in capsys.readouterr().out
    assert json.loads((tmp_path / "l.json").read_text())["counts"]["fedavg"]["around"] == 5
    fails(capsys, 2, "fedavgg", launches.main, ["--only", "fedavgg"])


# Many tensors at once


def states() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(3):
        weight = torch.randn(4, 3, 2, 2, generator=generator).contiguous(memory_format=torch.channels_last)
        made.append({"a": weight, "b": torch.randn(5, generator=generator)})
    return made


def test_entrywise_is_the_formula_of_each_entry():
    a, b, _ = states()
    b["other"] = torch.zeros(1)
    c = entrywise(lambda x, y: x - 2 * y, a, b)
    assert list(c) == ["a", "b"]
    for name, v in c.items():
        assert torch.equal(v, a[name] - 2 * b[name]) and v.stride() == a[name].stride()
    assert entrywise(lambda x: x > 0, a)["b"].dtype == torch.bool


def test_a_vector_and_its_parts():
    a = list(states()[0].values())
    vector = as_vector(a)
    assert torch.equal(vector, torch.cat([v.reshape(-1) for v in a]))
    for part, v in zip(parts_of(vector, a), a, strict=True):
        assert torch.equal(part, v)


def test_a_copy_is_deep():
    a = {"w": states()[0] | {"n": tensor(3)}, "list": [tensor(1.0), "word", 2], "pair": (tensor(2),)}
    b = copied(a)
    a["w"]["a"].zero_()
    a["list"][0].zero_()
    assert b["w"]["a"].any() and b["w"]["n"] == 3 and b["list"][0] == 1 and b["list"][1:] == ["word", 2]
    assert b["w"]["a"].stride() == a["w"]["a"].stride() and isinstance(b["pair"], tuple)


def test_logs_of_the_host_keep_all_digits():
    scalars = {0: [common.exactly(0.1), tensor(1.5)], 1: [], 2: [tensor(2)]}
    assert common.fetched(scalars, "cpu") == {0: [0.1, 1.5], 1: [], 2: [2.0]}


# On a GPU


def test_batches_are_copied_one_ahead(monkeypatch):
    """Each batch is fetched, on the copying stream, before the one before it is computed on."""
    happened = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            happened.append("wait")

    @contextlib.contextmanager
    def stream(it):
        happened.append("copy")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda v, stream: happened.append("record"))
    given = [(tensor([n]), tensor([n])) for n in range(3)]
    for n, (pixels, _) in enumerate(common.one_ahead(iter(given), "cuda")):
        assert pixels == n
        happened.append(n)
    here = ["wait", "record", "record", "copy"]
    assert happened == ["copy", *here, 0, *here, 1, *here, 2]


@pytest.mark.parametrize("flags,alone", [
    ("fedavg", 1), ("fdse", 6), ("baselines.fedbn", 6), ("fedcir", 6), ("baselines.scaffold", 1),
    ("baselines.feddyn", 1), ("baselines.moon", 1), ("baselines.moon --evaluated trained", 6),
    ("baselines.centralized", 1),
])
def test_clients_of_one_model_are_tested_together(monkeypatch, flags, alone):
    """With the rule of a GPU: the same counts of right images, from one network, also of clients that keep
    something and are tested without it."""
    method, *flags = flags.split()
    args = parsed(method, "--scale", "smoke", "--precision", "fp32", "--steps", "1", *flags)
    module = importlib.import_module(method)
    domains, classes = common.load_domains(args)
    fed = common.federation(module.Server, module.Client, args, launches.builder_of(module), domains, classes)
    fed.server.update({k: client.train(fed.server.download(k), 0) for k, client in fed.clients.items()}, 0)
    each = common.evaluate_classifiers(fed, 1, -1.0)
    assert len(common.of_one_model(fed)) == 6
    monkeypatch.setattr(common, "on_gpu", lambda args: True)
    monkeypatch.setattr(common, "evaluation_batch", lambda args: 1000)
    assert len(common.of_one_model(fed)) == alone
    assert common.evaluate_classifiers(fed, 1, -1.0) == each


def test_a_batch_of_an_evaluation_may_have_several_parts():
    args = parsed("fedavg", "--batch-size", 100)
    data = [common.Data(torch.full((n, 1, 2, 2), n, dtype=torch.uint8), torch.arange(n), torch.full((n,), n),
                        "cpu", "unit") for n in (30, 90, 250, 0, 20)]
    sizes = []
    labels = []
    for x, y in common.in_order(data, args):
        assert torch.equal((x[:, 0, 0, 0] * 255).round().long(), y)
        sizes.append(len(y))
        labels.append(y)
    assert sizes == [30, 90, 100, 100, 70]  # none above 100, and as many as fit
    assert torch.cat(labels).bincount().nonzero()[:, 0].tolist() == [20, 30, 90, 250]
