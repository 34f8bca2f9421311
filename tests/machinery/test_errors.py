"""How a program ends: the line and the exit code for each kind of error."""

import os
import signal
import subprocess
import sys

import fedavg
from plumbing.errors import Interrupted, UserError, ending, out_of_memory, patient_output

import pytest
import torch

from tests.conftest import ROOT, parsed, run_all, run_here


@pytest.mark.parametrize("error, line, code", [
    (UserError("no such domain", 2), "no such domain", 2),
    (UserError("it is damaged"), "it is damaged", 1),
    (KeyboardInterrupt(), "interrupted; the rounds are kept", 130),
    (MemoryError(), "out of memory (MemoryError): give smaller batches or images", 1),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried"),
     "out of memory (CUDA out of memory.): give smaller batches or images", 1),
    (OSError(28, "No space left on device", "x.npy"),
     "No space left on device: x.npy; make room or give another folder; the rounds are kept", 1),
    (FileExistsError(17, "File exists", "out"),
     "File exists: out; a file is where a folder is expected: give another folder; the rounds are kept", 1),
    (Interrupted(15), "interrupted; the rounds are kept", 143),
    (Interrupted(2, "round 3 is kept"), "interrupted; round 3 is kept", 130),
    (Interrupted(0, "stopped after round 3"), "stopped after round 3", 0),
    (OSError("no"), "no; give another file or folder; the rounds are kept", 1)])
def test_line_and_code_of_an_error(error, line, code):
    assert ending(error, "the rounds are kept") == (line, code)


def test_an_allocation_too_large_for_the_cpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as e:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(e.value)


def test_a_baseline_started_as_a_file_says_how():
    path = ROOT / "baselines" / "fedprox.py"
    run = subprocess.run([sys.executable, path], cwd="/", text=True, capture_output=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == f"fedprox: start it as python -m baselines.fedprox, in {ROOT}\n"


def test_a_reader_that_leaves_is_no_error(monkeypatch):
    """As `head -1`. Nor is what is written to it afterwards."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts; another test's --help has changed it
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        with patient_output():
            for _ in range(2):
                print("a line", flush=True)


def test_a_run_without_outputs_goes_on(tmp_path, monkeypatch):
    """As with `>&- 2>&-`."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    flags = ["--scale", "smoke", "--image-size", "8", "--no-figures", "--rounds", "1", "--out", tmp_path]
    result, = run_all("fedavg", parsed("fedavg", *flags))
    assert result["best"]["round"] == 1


def test_escape_codes_of_names_do_not_act_on_a_terminal(capsys):
    with patient_output():
        print("a\x1b[31mb\x9bc\u202ed\rü\te\nf\x1b[Ag")
    assert capsys.readouterr().out == "a\\x1b[31mb\\x9bc\\u202ed\rü\te\nf\x1b[Ag\n"


def test_a_fault_of_the_program_has_its_traceback_and_70(tmp_path, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(fedavg.Client, "train", lambda *_: 1 // 0)
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(ZeroDivisionError) as fault:
        run_here("fedavg", tmp_path)
    sys.excepthook(fault.type, fault.value, fault.tb)
    assert codes == [70] and capsys.readouterr().err.endswith("by zero\n")


@pytest.mark.parametrize("library, advice", [
    ("not_there", "pip install -r requirements.txt"), ("fcntl", "this program runs on Linux and macOS"),
])
def test_a_library_that_is_missing_is_one_line(library, advice):
    """Windows has no fcntl."""
    program = f"import sys, plumbing.errors; sys.modules[{library!r}] = None; import {library}"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert f"the library {library} is missing: {advice}" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("environment, words", [
    ({"MPLBACKEND": "nonsense"}, ["fedavg.py", "--scale", "smoke", "--rounds", "1"]),
    ({"PYTHONOPTIMIZE": "2"}, ["fedavg.py", "--help"]),
    ({"PYTHONOPTIMIZE": "2"}, ["reproduce_tables.py", "--help"]),
    ({"PYTHONOPTIMIZE": "2"}, ["-m", "reproduce.measures", "--help"]),
    ({"PYTHONOPTIMIZE": "2"}, ["-m", "bench.bench", "--help"]),
    ({"PYTHONIOENCODING": "ascii"}, ["reproduce_tables.py", "--only", "fdse-1"]),
])
def test_odd_environments(tmp_path, environment, words):
    out = [] if "--help" in words else ["--out", str(tmp_path / "out")]
    run = subprocess.run([sys.executable, *words, *out], cwd=ROOT, env=os.environ | environment, text=True,
                         capture_output=True)
    assert run.returncode == 0, run.stderr
