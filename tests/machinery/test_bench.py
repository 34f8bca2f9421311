"""The benchmark measures every row; its numbers are no test."""


from bench import bench
from tests.conftest import read_json
from tests.machinery.test_archives import write_office

import pytest


def test_the_clock_waits_for_a_gpu(monkeypatch):
    waited = []
    monkeypatch.setattr(bench.torch.cuda, "synchronize", waited.append)
    bench.now("cpu")
    assert waited == [] and bench.now("cuda:1") > 0 and waited == ["cuda:1"]


@pytest.mark.slow
def test_a_round_of_office(tmp_path, monkeypatch):
    write_office(tmp_path, monkeypatch, {})
    folders = ["--archives", str(tmp_path / "archives"), "--data", str(tmp_path / "data")]
    bench.main([*folders, "--size", "64", "--rounds", "2", "--out", str(tmp_path / "b.json")])
    seconds = {row[0]: row[1] for row in read_json(tmp_path / "b.json")["rows"]}
    assert len(seconds) == 12 and min(seconds.values()) > 0
    for name in ("fedavg fp32", "fdse bf16"):
        assert seconds[f"{name}: ours, training"] < seconds[f"{name}: ours, whole round"]
