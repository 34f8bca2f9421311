"""The benchmark measures every row; its numbers are no test."""

import json
import subprocess
import sys

from bench import bench
from tests.conftest import ROOT, zipped

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("flags,rows", [
    (["--views", "--size", "40"], ["augment.py, the whole batch", "bare steps", "FedGaLA's steps"]),
    (["--methods"], ["FedAvg", "FedL2R", "FedSR", "FedCiR", "FedADG", "FDSE"]),
])
def test_made_up_images(tmp_path, flags, rows):
    out = tmp_path / "b.json"
    words = [sys.executable, "-m", "bench.bench", *flags, "--rounds", "1", "--out", out]
    assert subprocess.run(words, cwd=ROOT).returncode == 0
    written = json.loads(out.read_text())
    assert written["command"] == f"python -m bench.bench {' '.join(flags)} --rounds 1"
    seconds = {row[0]: row[1] for row in written["rows"]}
    assert set(rows) <= set(seconds) and len(seconds) >= 4
    assert min(seconds.values()) > 0


@pytest.mark.slow
def test_a_round_of_office(tmp_path, office, capsys):
    """On a tiny archive: each row is measured in each pass, and only there."""
    zipped(office, tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip")
    folders = ["--archives", str(tmp_path / "archives"), "--data", str(tmp_path / "data")]
    bench.main([*folders, "--size", "64", "--rounds", "2", "--out", str(tmp_path / "b.json")])
    expected = ["fedavg fp32: usual pipeline"]
    for method in bench.METHODS:
        for precision in ("fp32", "bf16"):
            for row in bench.ROWS:
                expected.append(f"{method} {precision}: {row}")
    written = json.loads((tmp_path / "b.json").read_text())
    assert set(written["seconds"]) == set(expected)
    for row, seconds in written["seconds"].items():
        assert len(seconds) == 2 and min(seconds) > 0, row
    for method in bench.METHODS:
        training = written["seconds"][f"{method} fp32: ours, training"]
        whole = written["seconds"][f"{method} fp32: ours, whole round"]
        for part, of_round in zip(training, whole, strict=True):
            assert part < of_round
    assert written["images"] == 4 * 16
    assert "times as fast as the usual pipeline" in capsys.readouterr().out
