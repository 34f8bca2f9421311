"""How a program ends: the line and the exit code for each kind of error."""

import os
import subprocess
import sys

from plumbing.run.errors import ending, out_of_memory

import pytest
import torch

from tests.conftest import ROOT


@pytest.mark.parametrize("error, line, code", [
    (torch.OutOfMemoryError("CUDA out of memory.\nTried"),
     "out of memory (CUDA out of memory. Tried): give smaller batches or images", 1),
    (OSError("no"), "no; give another file or folder; the rounds are kept", 1)])
def test_line_and_code_of_an_error(error, line, code):
    assert ending(error, "the rounds are kept") == (line, code)


def test_an_allocation_too_large_for_the_cpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as e:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(e.value)


def test_a_library_that_is_missing_is_one_line():
    program = "import plumbing.run.errors; import not_there"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert "the library not_there is missing: pip install it" in run.stderr


def test_a_variable_of_tqdm_that_is_no_number():
    """It ended the import of tqdm, and so that of torch, before which common.py imports from plumbing/."""
    wrong = {"TQDM_MININTERVAL": "abc", "TQDM_UNIT_DIVISOR": "1.5", "TQDM_NCOLS": "1.5", "TQDM_TOTAL": "x"}
    words, env = [sys.executable, "-c", "import plumbing, tqdm"], os.environ | wrong
    run = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, env=env)
    assert (run.returncode, run.stderr.count("\n")) == (0, 4)
    for name, value in wrong.items():
        assert f"{name} is '{value}', expected a number: it is left out" in run.stderr
    text = (ROOT / "common.py").read_text()
    assert text.index("\nfrom plumbing") < text.index("\nimport torch")


def test_a_stderr_that_the_shell_has_closed_ends_nothing():
    program = "import plumbing.run.errors, sys; print(sys.stderr.isatty())"
    words = ["sh", "-c", f"{sys.executable} -c '{program}' 2>&-"]
    assert subprocess.run(words, cwd=ROOT, text=True, stdout=subprocess.PIPE).stdout == "False\n"
