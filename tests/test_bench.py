"""The benchmark measures every row; its numbers are no test."""

import json
import subprocess
import sys

from tests.conftest import ROOT

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--views", "--size", "40"], ["--methods"]])
def test_the_benchmark_runs(tmp_path, flags):
    out = tmp_path / "b.json"
    words = [sys.executable, "-m", "bench.bench", *flags, "--rounds", "1", "--out", str(out)]
    assert subprocess.run(words, cwd=ROOT).returncode == 0
    assert len(json.loads(out.read_text())["rows"]) >= 4
