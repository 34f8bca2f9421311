"""How a program ends: the line and the exit code for each kind of error."""

import subprocess
import sys
import time

import common
from plumbing import errors
from plumbing.errors import Interrupted, Stop, ending, out_of_memory

import pytest
import torch

from .conftest import ROOT, parsed, run_all


@pytest.mark.parametrize("error, line, code", [
    (Stop("no such domain", 2), "no such domain", 2),
    (Stop("it is damaged"), "it is damaged", 1),
    (KeyboardInterrupt(), "interrupted; the rounds are kept", 130),
    (MemoryError(), "out of memory (MemoryError): give smaller batches or images", 1),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried"),
     "out of memory (CUDA out of memory.): give smaller batches or images", 1),
    (OSError(28, "No space left on device", "x.npy"),
     "No space left on device: x.npy; make room or give another folder; the rounds are kept", 1),
    (FileExistsError(17, "File exists", "out"),
     "File exists: out; a file is where a folder is expected: give another folder; the rounds are kept", 1),
    (PermissionError(13, "Permission denied", "out"),
     "Permission denied: out; give a file or folder that may be written and read; the rounds are kept", 1),
    (Interrupted(15), "interrupted; the rounds are kept", 143),
    (Interrupted(2, "round 3 is kept"), "interrupted; round 3 is kept", 130),
    (OSError("no"), "no; give another file or folder; the rounds are kept", 1)])
def test_line_and_code_of_an_error(error, line, code):
    assert ending(error, "the rounds are kept") == (line, code)


def test_a_fault_of_the_program_is_raised_again():
    with pytest.raises(ZeroDivisionError):
        ending(ZeroDivisionError(), "the rounds are kept")


@pytest.mark.parametrize("error, is_memory", [
    (MemoryError(), True),
    (torch.OutOfMemoryError(), True),
    (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
    (RuntimeError("shapes do not fit"), False),
    (OSError(12, "Cannot allocate memory"), False)])
def test_what_counts_as_out_of_memory(error, is_memory):
    assert out_of_memory(error) == is_memory


def test_an_allocation_too_large_for_the_cpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as e:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(e.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_allocation_too_large_for_the_gpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as e:
        torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
    assert out_of_memory(e.value)


def test_torch_is_not_imported_to_tell_of_an_error():
    program = "import sys; from plumbing.errors import ending; ending(MemoryError(), ''); "
    program += "print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True)
    assert run.stdout == "False\n", run.stderr


def test_a_baseline_started_as_a_file_says_how():
    path = ROOT / "baselines" / "fedprox.py"
    run = subprocess.run([sys.executable, path], cwd="/", text=True, capture_output=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == f"fedprox: start it as python -m baselines.fedprox, in {ROOT}\n"


def test_a_library_that_is_missing_is_one_line():
    program = "import plumbing.errors; import a_library_that_is_not_there"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert "the library a_library_that_is_not_there is missing: pip install -r requirements.txt" in run.stderr


def test_streams_that_are_closed_or_know_no_letters():
    program = "import sys, plumbing.errors; print(chr(252), file=sys.stderr); print(chr(252))"
    here = {"cwd": ROOT, "env": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, **here)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"\\xfc\n", b"\\xfc\n")
    words = f'exec {sys.executable} -c "{program}" >&- 2>&-'
    assert subprocess.run(["sh", "-c", words], **here).returncode == 0


def test_a_run_says_at_once_what_it_starts_and_waits_for(tmp_path, monkeypatch, capsys):
    """Before any data is read; and that it reads, if that is long."""
    said = []

    def reading(args):
        before, end = "", time.monotonic() + 10
        while "reading" not in before and time.monotonic() < end:
            before += capsys.readouterr().out
            time.sleep(0.01)
        said.append(before.splitlines())
        raise Stop("no data")

    monkeypatch.setattr(common, "open_dataset", reading)
    monkeypatch.setattr(errors, "SAID_AFTER", 0.01)
    for flags in (["--seed", "0"], ["--protocol", "lodo", "--seed", "3"]):
        with pytest.raises(SystemExit):
            run_all("fedavg", parsed("fedavg", "--out", tmp_path, "--precision", "fp32", *flags))
        assert capsys.readouterr() == ("", "fedavg: no data\n")
    (first, second, third), (first_of_several, *_) = said
    assert first == "fedavg on digits, indomain, seed 0"
    assert "fp32, threads: 1" in second
    assert third == "reading the images of digits"
    assert first_of_several == "fedavg on digits, lodo, seed 3"
