"""Measures of finished runs: distances, FLOPs and costs against hand counts, federations against what the runs recorded."""

import json
import os
import shutil

import common
from tests.conftest import run_here

import learners
import linear
import measures
import numpy as np
import pytest
import torch
from basics import Stop
from torch import nn


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished smoke runs: a folder for each method and protocol."""
    place = tmp_path_factory.mktemp("runs")
    for m in ("fedavg", "fdse"):
        run_here(m, place / f"{m}-indomain")
        run_here(m, place / f"{m}-lodo", "--protocol", "lodo", "--target", "d0")
    return place


def gaussians(n, dim, distance, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, n, dim))
    b[:, 0] += distance
    return a, b


def test_pad_of_known_sets():
    same = [measures.proxy_a_distance(*gaussians(4000, 4, 0, s), seed=s) for s in range(4)]
    assert abs(np.mean(same)) < 0.06 and max(map(abs, same)) < 0.15
    assert measures.proxy_a_distance(*gaussians(200, 4, 40)) == 2
    # unit Gaussians at a distance of 2: the best linear rule errs with probability Phi(-1) = 0.15866
    near = [measures.proxy_a_distance(*gaussians(4000, 4, 2, s), seed=s) for s in range(4)]
    assert abs(np.mean(near) - 2 * (1 - 2 * 0.15866)) < 0.04


def test_pad_is_balanced_repeats_and_takes_tensors():
    a, b = gaussians(3000, 3, 0)
    assert abs(measures.proxy_a_distance(a, b[:300])) < 0.35  # unbalanced sets would give a test error of 1/11
    assert abs(measures.proxy_a_distance(a[:300], b)) < 0.35
    first = measures.proxy_a_distance(a, b, 3)
    assert first == measures.proxy_a_distance(torch.from_numpy(a), torch.from_numpy(b), 3)
    assert first != measures.proxy_a_distance(a, b, 4)
    assert measures.proxy_a_distance(a * [1, 1e6, 1e-6] + 7, b * [1, 1e6, 1e-6] + 7, 3) == pytest.approx(first, abs=1e-9)
    with pytest.raises(Stop, match="needs 4 images"):
        measures.proxy_a_distance(a[:3], b)


def test_flops_by_hand():
    """Two FLOPs for a multiply-add; the first layer's input has no gradient. Groups divide the products of a convolution."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.Flatten(),
                        nn.Linear(16 * 36, 5))
    B = 4
    first, grouped, linear = (2 * B * n for n in (36 * 8 * 3 * 9, 36 * 16 * 1 * 9, 16 * 36 * 5))
    before = common.state(net)
    assert measures.flops(net, (B, 3, 6, 6)) == (first + grouped + linear, 2 * first + 3 * (grouped + linear))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()) and net[0].weight.grad is None


def test_training_flops_are_those_of_a_step(runs):
    """FedAvg trains by one forward and backward pass; FDSE's L_Con adds no products, so its step is that of its network."""
    for m in ("fedavg", "fdse"):
        args, server, clients, *_ = measures.federation(runs / f"{m}-indomain")
        step = measures.flops(clients[0].model(server.download(0)), (16, 1, 28, 28))[1] / 16
        assert measures.training_flops(runs / f"{m}-indomain") == pytest.approx(step)


def write_run(folder, values, **args):
    """A hand-written record of a FedAvg run of two clients, of which b misses round 2; bytes are 3 up and 7 down."""
    folder.mkdir()
    lines = [{"round": t + 1, "clients": {n: {"bytes_up": 3, "bytes_down": 7, "loss": t + (n == "b")}
                                          for n in ("ab" if t != 1 else "a")}} |
             ({"val": {}, "test": {"AVG": v, "ALL": v / 2}} if v is not None else {}) for t, v in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    key = {"method": "fedavg", "dataset": "digits", "batch_size": 4, "device": "cpu", "precision": "fp32"} | args
    (folder / "result.json").write_text(json.dumps({
        "method": "fedavg", "args": key, "best": {"round": 1}, "last": {"round": len(values)}, "peak_memory_mib": 12,
        "hardware": {"gpu_peak_memory_mib": None}}))
    return folder


def test_cost_by_hand(tmp_path):
    run = write_run(tmp_path / "a", [0.5, None, 0.6, 0.9], epochs=2)
    sizes = {"a": 10, "b": 20}
    cost = measures.cost_to_reach(run, 0.6, 1e12, sizes)
    # a trains three rounds of 2 x 10 images, b two of 2 x 20: 140 images and 5 exchanges of 10 bytes, for two clients
    assert cost == {"round": 3, "tflops": pytest.approx(70), "gb": pytest.approx(25e-9), "memory_mib": 12,
                    "gpu_memory_mib": None}
    assert measures.cost_to_reach(run, 0.5, 1e12, sizes)["round"] == 1
    assert measures.cost_to_reach(run, 0.4, 1e12, sizes, by="ALL")["round"] == 4
    assert measures.cost_to_reach(run, 0.95, 1e12, sizes) is None
    steps = write_run(tmp_path / "b", [0.5], steps=3)  # of 4 + 4 + 2 and of 4 + 4 + 4 images
    assert measures.cost_to_reach(steps, 0.5, 1e12, sizes)["tflops"] == pytest.approx(11)
    assert measures.risk_curve(run) == ([1, 2, 3, 4], [0.5, 1.0, 2.5, 3.5])
    for wrong in (dict(accuracy=60), dict(accuracy=0), dict(by="target"), dict(by="x"), dict(sizes={"a": 10})):
        with pytest.raises(Stop):
            measures.cost_to_reach(**dict(folder=run, accuracy=0.5, flops_per_image=1, sizes=sizes) | wrong)


@pytest.mark.parametrize("name", ["fedavg-indomain", "fdse-indomain", "fedavg-lodo", "fdse-lodo"])
def test_federation_has_the_recorded_accuracies(runs, name):
    result = json.loads((runs / name / "result.json").read_text())
    for which in ("best", "last"):
        got = {c.data.name: common.correct(model, c.data.test, args) / len(c.data.test)
               for args, c, model in measures.tested(runs / name, which)}
        target = {"d0": result[which]["target"]} if "lodo" in name else {}
        assert got == result[which]["clients"] | target
        made = measures.federation(runs / name, which)
        assert len(made) == 5 and len(made[3]) == ("lodo" in name) and len(made[4]) == 10


def test_older_and_newer_records(runs, tmp_path):
    """A field that the record lacks takes its default, one that Args lacks is left out, one of another type is refused."""
    for change, ok in (({"momentum": None, "future": 3}, True), ({"lr": "fast"}, False)):
        folder = tmp_path / str(ok)
        shutil.copytree(runs / "fedavg-indomain", folder)
        result = json.loads((folder / "result.json").read_text())
        result["args"] = {k: v for k, v in (result["args"] | change).items() if v is not None}
        (folder / "result.json").write_text(json.dumps(result))
        saved = common.load_file(folder / "best.pt", "checkpoint")
        torch.save(saved | {"identity": json.dumps(result["args"])}, folder / "best.pt")
        if ok:
            assert measures.federation(folder)[0].momentum == 0
        else:
            with pytest.raises(Stop, match="lr is 'fast'"):
                measures.federation(folder)


def test_representations(runs):
    args, server, clients, target, _ = measures.federation(runs / "fdse-lodo")
    model = clients[1].model(server.download(1))
    data = clients[1].data.train
    z, y = measures.representations(model, data, args)
    x, labels = data.batch(torch.arange(len(data)))
    assert z.dtype == torch.float32 and torch.equal(y, labels) and not model.training
    torch.testing.assert_close(z, model.features(x).detach())
    loss = nn.functional.cross_entropy(model(x), labels).item()
    risks = measures.local_risks(runs / "fdse-lodo")["clients"]
    assert risks[clients[1].data.name]["train"] == pytest.approx(loss, rel=1e-5)


def test_pad_table_and_local_risks(runs):
    table = measures.pad_table(runs / "fdse-lodo", part="all")
    assert len(table["pairs"]) == 10 and len(table["global"]) == 5 and "d0" not in table["global"]  # the target is no client
    assert table["mean_pairs"] == pytest.approx(np.mean(list(table["pairs"].values())))
    assert set(table["images"].values()) == {40} and table["method"] == "FDSE"
    risks = measures.local_risks(runs / "fdse-lodo")
    assert risks["target"]["name"] == "d0" and risks["mean"]["test"] == pytest.approx(
        np.mean([r["test"] for r in risks["clients"].values()]))


@pytest.mark.parametrize("name", ["os", "common", "measures", "tests", "../fedavg", "nowhere", "", None, ["fedavg"]])
def test_a_foreign_module_is_refused(tmp_path, name):
    run = write_run(tmp_path / "a", [0.5], method=name)
    result = json.loads((run / "result.json").read_text()) | {"method": name}
    (run / "result.json").write_text(json.dumps(result))
    with pytest.raises(Stop, match="is no method of this repository"):
        measures.federation(run)


def test_a_damaged_folder_is_one_line(runs, tmp_path, capsys):
    def stops(words, *flags, code=2):
        with pytest.raises(SystemExit) as end:
            measures.main([*map(str, flags)])
        error = capsys.readouterr().err.splitlines()
        assert end.value.code == code and len(error) == 1 and words in error[0], error

    def damaged(file, content):
        folder = tmp_path / f"{file}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(runs / "fedavg-indomain", folder)
        (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
        return folder

    stops("no such file", "pad", tmp_path / "nowhere")
    stops("result.json: no such file", "risk", damaged("result.json", None))
    for content in (b"", b"{", b"\xff", b"[]", b"{}", b'{"method": 1, "args": 2}'):
        stops("is damaged", "pad", damaged("result.json", content))
    stops("no such file", "pad", damaged("best.pt", None))
    stops("cannot be read", "pad", damaged("best.pt", b"PK"), code=1)
    stops("different runs or rounds", "pad", damaged("best.pt", (runs / "fedavg-lodo" / "best.pt").read_bytes()))
    half = common.load_file(runs / "fedavg-indomain" / "best.pt", "checkpoint")
    half["server"]["w"].popitem()
    folder = damaged("best.pt", None)
    torch.save(half, folder / "best.pt")
    stops("does not fit fedavg.py", "pad", folder)
    stops("is damaged", "risk", damaged("metrics.jsonl", b'{"round": 1'))
    good = runs / "fedavg-indomain"
    stops("--target is empty", "tsne", good)
    stops("its domains are d0", "tsne", good, "--target", "d99")
    stops("--accuracy goes with cost", "pad", good, "--accuracy", 0.5)
    stops("--accuracy is 60.0", "cost", good, "--accuracy", 60)
    stops("give two folders", "pad", good, "--out", tmp_path / "a.png")
    stops(".png, .pdf or .svg", "risk", good, "--out", tmp_path / "a.txt")
    stops("did you mean --source", "tsne", good, "--sourc", "d0")
    stops("invalid choice", "paint", good)


def test_figures_are_written_whole(runs, tmp_path, monkeypatch, capsys):
    out, numbers = tmp_path / "sub" / "t.png", tmp_path / "t.json"
    folders = [str(runs / f"{m}-lodo") for m in ("fedavg", "fdse")]
    measures.main(["tsne", *folders, "--out", str(out), "--json", str(numbers), "--images", "12"])
    assert out.read_bytes().startswith(b"\x89PNG") and [*out.parent.iterdir()] == [out]
    found = json.loads(numbers.read_text())["runs"]
    assert [(r["method"], r["source"], r["target"]) for r in found] == [("FedAvg", "d15", "d0"), ("FDSE", "d15", "d0")]
    assert np.shape(found[0]["target_points"]["place"]) == (12, 2)
    measures.main(["pad", *folders, "--part", "all", "--out", str(tmp_path / "p.svg")])
    measures.main(["risk", *folders, "--out", str(tmp_path / "r.pdf")])
    assert b"</svg>" in (tmp_path / "p.svg").read_bytes() and (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF")
    shown = capsys.readouterr().out
    assert "mean of mixture and client" in shown and "d0 (left out)" in shown
    before = out.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SystemExit):
        measures.main(["risk", *folders, "--out", str(out)])
    assert out.read_bytes() == before and [*out.parent.iterdir()] == [out]
    expected = "No space left on device: {}; make room or give another file or folder; the runs are as they were"
    assert capsys.readouterr().err == f"measures: {expected.format(out)}\n"


def test_cost_and_labels(runs, tmp_path, capsys):
    numbers = tmp_path / "c.json"
    folders = [str(runs / name) for name in ("fedavg-lodo", "fedavg-indomain")]
    measures.main(["cost", *folders, "--accuracy", "0.01", "--json", str(numbers)])
    first, second = json.loads(numbers.read_text())["runs"]
    assert first["method"].startswith("FedAvg [protocol lodo, target d0") and second["cost"]["round"] == 1
    assert second["cost"]["tflops"] == pytest.approx(32 * second["flops_per_image"] / 1e12)  # 32 of 40 images train
    assert "FedAvg [protocol indomain, target all" in capsys.readouterr().out


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        measures.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and all(f"--{name}" in text for name in measures.FLAGS)


# Runs without labels


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory):
    place = tmp_path_factory.mktemp("unlabelled")
    for name, flags in (("paper", ()), ("descent", ("--alignment-sign", "descent"))):
        run_here("fedgala", place / name, "--target", "d0", "--rounds", "3", *flags)
    return place


def noise(images, labels):
    """A `Data` of 1x8x8 images."""
    return common.Data(images, torch.arange(len(labels)), labels, "cpu", "unit")


def test_mutual_information():
    """Pixels rho-correlated over pairs of the same class: -F/2 log(1 - rho^2), Eq. (3); none: what chance gives, F / 2n."""
    rng, n, F = np.random.default_rng(0), 3000, 64
    labels = torch.arange(n)  # a class for each pair, so the pairs are known
    shared, own = rng.standard_normal((2, n, F))
    for rho in (0.0, 0.5, 0.8):
        other = rho * shared + np.sqrt(1 - rho ** 2) * own
        images = [torch.tensor((128 + 30 * v).clip(0, 255).round()).to(torch.uint8).view(n, 1, 8, 8) for v in (shared, other)]
        found, chance = measures.mutual_information(*(noise(v, labels) for v in images), size=8)
        assert found == pytest.approx(-F / 2 * np.log(1 - rho ** 2) + F / 2 / n, rel=0.02, abs=0.005)
        assert chance == pytest.approx(F / 2 / n, rel=0.5)
    with pytest.raises(Stop, match="needs at least 8"):
        measures.mutual_information(noise(images[0][:3], labels[:3]), noise(images[1][:3], labels[:3]), size=8)


def test_gradient_pairs(unlabelled, monkeypatch):
    """Covariance and cosine of known gradients: a loss whose gradient is a constant vector of each domain."""
    found = measures.gradient_pairs(unlabelled / "paper", batches=2)
    assert len(found["pairs"]) == 15 and "d75 / d0" in found["pairs"]
    again = measures.gradient_pairs(unlabelled / "paper", batches=2)
    assert found == again
    for pair in found["pairs"].values():
        assert abs(pair["cosine"]) <= 1 and pair["chance"] > 0 and np.isfinite(list(pair.values())).all()
    constants = iter(range(1, 7))

    def loss(model, x1, x2):
        value = next(constants)
        return sum((p * torch.linspace(value, -1, p.numel()).view(p.shape)).sum() for n, p in model.named_parameters()
                   if n == "g.3.bias") + 0 * sum(p.sum() for p in model.parameters())
    monkeypatch.setattr(learners.Learner, "loss", loss)
    made = measures.gradient_pairs(unlabelled / "paper", batches=1)["pairs"]["d15 / d30"]
    args, server, *_ = measures.federation(unlabelled / "paper")
    sizes = {n: v.numel() for n, v in server.w.items() if "running" not in n and "num_batches" not in n}
    vectors = [np.zeros(sum(sizes.values())) for _ in range(2)]
    for i, v in enumerate(vectors):
        v[:args.dim] = np.linspace(i + 1, -1, args.dim)
    assert made["covariance"] == pytest.approx(np.cov(*vectors, bias=True)[0, 1], rel=1e-4)
    assert made["cosine"] == pytest.approx(vectors[0] @ vectors[1] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[1]), rel=1e-4)


def test_curves_of_runs(unlabelled, tmp_path, capsys):
    folders = [str(unlabelled / name) for name in ("paper", "descent")]
    measures.main(["curve", *folders, "--of", "discarded", "--out", str(tmp_path / "f.png"), "--json", str(tmp_path / "f.json")])
    curves = json.loads((tmp_path / "f.json").read_text())["curves"]
    assert list(curves) == ["FedGaLA [alignment_sign paper]", "FedGaLA [alignment_sign descent]"]
    logs = json.loads((unlabelled / "paper" / "result.json").read_text())["logs"]["discarded"]
    shown = curves["FedGaLA [alignment_sign paper]"]
    assert shown["round"] == [2, 3] and shown["value"] == pytest.approx(logs[1:], abs=1e-5)
    assert (tmp_path / "f.png").stat().st_size > 5000
    assert measures.curve_of(folders[0], "target")[0] == [1, 2, 3]
    with pytest.raises(SystemExit):
        measures.main(["curve", *folders, "--of", "losses"])
    assert "has not logged 'losses'; it has" in capsys.readouterr().err


def test_measures_of_a_run_without_labels(unlabelled, tmp_path, capsys):
    """The networks are the last round's; what needs a classifier or test images says so."""
    folder = str(unlabelled / "paper")
    args, server, clients, (target,), _ = measures.federation(folder)
    z, y = common.representations(target.model(server.download(5)), target.data.test, args)
    for ratio, accuracy in json.loads((unlabelled / "paper" / "result.json").read_text())["last"]["linear"]["d0"].items():
        seed = common.seed_all(args.seed, "linear", common.seed_name(args, "d0")).initial_seed()
        assert linear.accuracy(z, y, 10, float(ratio), seed, lr=3e-3, epochs=100, batch=512) == accuracy
    measures.main(["tsne", folder, "--out", str(tmp_path / "t.png"), "--images", "30"])
    measures.main(["pad", folder, "--part", "all"])
    for words, text in ((["pad", folder], "--part all"), (["risk", folder], "without labels"),
                        (["cost", folder], "has no accuracy AVG")):
        with pytest.raises(SystemExit) as end:
            measures.main(words)
        lines = capsys.readouterr().err.strip().splitlines()
        assert end.value.code == 2 and len(lines) == 1 and text in lines[0]
    measures.main(["cost", folder, "--accuracy", "0.01", "--by", "target"])
