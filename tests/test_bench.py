"""The benchmark measures every row; its numbers are no test."""

import json
import os
import re
import subprocess
import sys

from bench import bench, peers
from bench import together as bench_together
from tests.conftest import MODULES, ROOT, fails, zipped
from tests.small_table import recorded, two_tables

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("flags,rows", [
    (["--views", "--size", "40"], ["augment.py, the whole batch", "bare steps", "FedGaLA's steps"]),
    (["--methods", "--steps", "1"], ["FedAvg", "FedL2R", "FedSR", "FedCiR", "FedADG", "FDSE"]),
])
def test_made_up_images(tmp_path, flags, rows):
    out = tmp_path / "b.json"
    words = [sys.executable, "-m", "bench.bench", *flags, "--rounds", "1", "--out", out]
    assert subprocess.run(words, cwd=ROOT).returncode == 0
    written = json.loads(out.read_text())
    assert written["command"] == f"python -m bench.bench {' '.join(flags)} --rounds 1"
    assert written["device"] == "cpu"
    seconds = {row[0]: row[1] for row in written["rows"]}
    assert set(rows) <= set(seconds) and len(seconds) >= 4
    assert min(seconds.values()) > 0


@pytest.mark.parametrize("figures, words", [
    ({"device": "cuda:0", "hardware": {"gpu": "NVIDIA X"}}, "has figures of cuda:0, not of cpu"),
    ({"hardware": {"gpu": "NVIDIA X"}}, "has figures of cuda, not of cpu"),
    ({"rows": []}, "is no file of this benchmark"),
])
def test_devices_are_not_mixed_in_a_file(tmp_path, capsys, figures, words):
    out = tmp_path / "b.json"
    out.write_text(json.dumps(figures))
    fails(capsys, 2, f"--out .*{words}.*give another one", bench.main, ["--out", str(out)])
    fails(capsys, 2, words, bench_together.main, ["--out", str(out)])
    assert json.loads(out.read_text()) == figures


def test_a_file_of_the_same_device_is_written_anew(tmp_path):
    out = tmp_path / "b.json"
    for figures in ({"hardware": {"gpu": None}}, {"device": "cpu", "hardware": {"gpu": None}}):
        out.write_text(json.dumps(figures))
        bench.refuse_another_device(str(out), "cpu")
    out.write_text(json.dumps({"device": "cuda:1", "hardware": {"gpu": "NVIDIA X"}}))
    bench.refuse_another_device(str(out), "cuda:0")


def test_the_clock_waits_for_a_gpu(monkeypatch):
    waited = []
    monkeypatch.setattr(bench.torch.cuda, "synchronize", waited.append)
    assert bench.seconds_of(lambda: None, "cpu") >= 0 and waited == []
    assert bench.seconds_of(lambda: None, "cuda:1") >= 0 and waited == ["cuda:1", "cuda:1"]


@pytest.mark.parametrize("call, flags, words", [
    (bench.main, ["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
    (bench.main, ["--device", "abacus"], "--device is abacus"),
    (bench_together.main, ["--jobs", "1,0"], "--jobs is 1,0; expected numbers from 1 on"),
    (peers.main, ["--with", "fate"], "--with fate is none of pfllib, flgo, flower"),
    (peers.main, ["--with", "pfllib"], "needs --pfllib, a git clone of .*PFLlib; found none"),
    (peers.main, ["--with", "pfllib", "--pfllib", "tests"], "needs --pfllib, .* found tests"),
])
def test_bad_flags(capsys, call, flags, words):
    fails(capsys, 2, words, call, flags)


@pytest.mark.parametrize("name, install", [
    ("flower", r'pip install "flwr\[simulation\]"'),
    ("flgo", "pip install flgo"),
])
def test_a_framework_that_is_missing_is_refused(monkeypatch, capsys, name, install):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    fails(capsys, 2, f"--with {name} needs it installed: {install}", peers.main, ["--with", name])


@pytest.mark.slow
def test_ours_and_the_usual_pipeline_beside_a_framework(tmp_path, office, monkeypatch, capsys):
    """On a tiny archive, with one framework that is there and one that fails: the others have their rows."""
    zipped(office, tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip")

    def in_a_process(name, flags, folder):
        x, y = peers.read_client(folder, 3)
        assert x.shape == (16, 3, 64, 64) and len(y) == 16 and flags.clients == 4
        if name == "flgo":
            raise bench_together.Stop("flgo: it fails")
        return 7.0
    monkeypatch.setattr(peers, "in_a_process", in_a_process)
    monkeypatch.setattr(peers, "refuse_missing", lambda flags: None)
    peers.main(["--archives", str(tmp_path / "archives"), "--data", str(tmp_path / "data"), "--size", "64",
                "--with", "flgo,pfllib", "--out", str(tmp_path / "p.json")])
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["device"] == "cpu" and written["seconds"]["pfllib"] == 7.0
    rows = ["ours, auto: training", "ours, auto: whole round", "ours, fp32: training",
            "ours, fp32: whole round", "usual pipeline", "pfllib"]
    assert list(written["seconds"]) == rows and min(written["seconds"].values()) > 0
    assert "peers: flgo: it fails" in capsys.readouterr().err


def test_a_run_that_ends_early_ends_the_series(monkeypatch, capsys, tmp_path):
    """What fitted is kept, and more at a time are not tried."""
    def together(flags, jobs):
        if jobs > 1:
            raise bench_together.Stop(f"with {jobs} at a time a run ended before its time")
        return {"jobs": jobs, "seconds": 2.0, "images_per_second": 50.0, "reserved_mib": None}
    monkeypatch.setattr(bench_together, "together", together)
    bench_together.main(["--jobs", "1,2,4", "--out", str(tmp_path / "t.json")])
    said = capsys.readouterr()
    assert "with 2 at a time a run ended" in said.err and "with 4" not in said.err
    assert [row["jobs"] for row in json.loads((tmp_path / "t.json").read_text())["rows"]] == [1]


@pytest.mark.slow
def test_every_method_has_a_row_beside_bare(tmp_path, capsys):
    out = tmp_path / "b.json"
    bench.main(["--every", "--rounds", "1", "--steps", "1", "--out", str(out)])
    rows = [row[0] for row in json.loads(out.read_text())["rows"]]
    others = ("fedgala", "baselines.fedema", "fedadg")  # without labels; three steps are its first part
    assert sorted(rows) == sorted(["bare", *(name for name in MODULES if name not in others)])
    said = capsys.readouterr().err
    assert "fedadg: not measured" in said and said.count("not measured") == 1
    assert "fedgala: without labels" in said


@pytest.mark.slow
def test_several_at_a_time(tmp_path):
    out = tmp_path / "t.json"
    words = ["--jobs", "1,2", "--rounds", "1", "--images", "20", "--size", "64", "--out", str(out)]
    bench_together.main(words)
    one, two = json.loads(out.read_text())["rows"]
    assert (one["jobs"], two["jobs"]) == (1, 2) and min(one["images_per_second"], two["seconds"]) > 0
    images = [row["images_per_second"] * row["seconds"] for row in (one, two)]
    assert images == [pytest.approx(4 * 16), pytest.approx(2 * 4 * 16)]


def all_at_once(out, *flags) -> subprocess.CompletedProcess:
    """bench/gpu.sh with these flags."""
    env = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "bench/gpu.sh", *map(str, flags)], cwd=ROOT, env=env, capture_output=True,
                          text=True)


@pytest.mark.parametrize("flags, words", [
    (["--quikc"], "--quikc is no flag"),
    (["--seconds"], "--seconds needs a value"),
    (["--seconds", "ten"], "--seconds is ten; expected a number"),
    (["--device", "tpu"], "--device is tpu; expected cuda, cuda:N or cpu"),
    (["--archives", "nowhere"], "--archives nowhere is no folder"),
])
def test_bad_usage_of_all_at_once(tmp_path, flags, words):
    done = all_at_once(tmp_path / "out", *flags)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_all_at_once_at_tiny_scale(tmp_path):
    """Every step's command runs; what needs the archive is left out with a line; a step that fails does not
    stop the next."""
    two_tables(tmp_path)
    done = all_at_once(tmp_path / "out", "--device", "cpu", "--quick", "--seconds", 3000, "--tables",
                       tmp_path / "tables")
    summary = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert done.stdout.splitlines() == summary, done.stderr
    steps = [line.split(":")[0] for line in summary[:-1]]
    assert steps == ["tests", "every", "rounds", "fedavg", "fdse", "together", "table"]
    of_step = dict(zip(steps, summary))
    for step in ("tests", "every", "fedavg", "fdse", "together"):
        assert re.search(r": (done in|ended at its limit of) \d+ s", of_step[step]), of_step
    assert "left out" in of_step["rounds"] and "failed with exit code 1" in of_step["table"]
    assert done.returncode == 1 and len(recorded(tmp_path / "out" / "runs.jsonl")) >= 2
    assert (tmp_path / "out" / "results" / "tables" / "fdse-91-smoke.md").exists()


@pytest.mark.slow
def test_all_at_once_ends_when_its_time_is_over(tmp_path):
    done = all_at_once(tmp_path / "out", "--device", "cpu", "--quick", "--seconds", 25)
    assert done.returncode == 0 and "together: not begun, the time is over" in done.stdout, done.stdout


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
