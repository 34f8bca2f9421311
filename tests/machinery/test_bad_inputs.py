"""Bad inputs, a row of bad_inputs.csv for each: a command line, the exit code, and the words of the one line
that answers it.

A method's flags alone are only parsed; behind `run` the method runs. In braces stands what is prepared, by
its path in a folder of the row's own: {tmp} that folder, {run} a finished run, {run/best.pt} its file, which
must stay as it is, {run/best.pt=half} the run with half of that file; see `Prepared`.
"""

import csv
import dataclasses
import importlib
import io
import os
import re
import shlex
import shutil
from pathlib import Path

import common
import reproduce_tables
from bench import bench
from plumbing.run.errors import one_line_on_failure
from plumbing.run.settings import flag_of
from reproduce import benchmark, compare, predict
from reproduce.measures import command as measures
from tests.conftest import MODULES, PROGRAMS, ROOT, fails, one_run, run_all, run_here, saved_in
from tests.finished_runs import once
from tests.own_images import write_images
from tests.small_table import small_folder

import pytest
import torch

with open((ROOT / "tests" / "bad_inputs.csv"), newline="", encoding="utf-8") as opened:
    HEADS, *ROWS = csv.reader(opened)

# What stands in braces

CONTENTS = {"empty": b"", "text": b"a,b\n1,2\n", "null": b"null", "binary": bytes(range(256))}
# Files of torch that are nothing of a run.
TENSORS = {
    "number": 3,
    "other": {"body.x": torch.zeros(2)},
    "infinite": {"body.x": torch.tensor([torch.inf])},
}


class Prepared:
    """What a row finds in a folder of its own; `made` has the folders that it gets copies of."""

    def __init__(self, place: Path, made: dict[str, Path]):
        self.place, self.made = place, made
        self.before = {}  # {what is prepared: its files}

    def words(self, line: str) -> list[str]:
        """The words of a line, with what is prepared for each pair of braces."""
        return shlex.split(re.sub(r"\{([^}]*)\}", lambda found: self.prepared(found[1]), line))

    def prepared(self, what: str) -> str:
        """The path of `tmp`, `run`, `run/best.pt`, and of `run/best.pt=half;run/metrics.jsonl=gone` that
        of the run."""
        if what == "tmp":
            return str(self.place)
        top = self.place / re.split("[/=]", what)[0]
        if top.name in self.made and not top.exists():
            shutil.copytree(self.made[top.name], top)
        for change in what.split(";") if "=" in what else []:
            path, _, how = change.partition("=")
            damage(self.place / path, how)
        self.before[top] = files_below(top)
        return str(top if "=" in what else self.place / what)

    def check_unchanged(self, code: int) -> None:
        """No file was changed, but of a run that had begun, and beside what is no run nothing came."""
        assert not list(self.place.rglob("*.tmp"))
        assert not (self.place / "out" / "metrics.jsonl").exists()
        for top, before in self.before.items():
            now = files_below(top)
            if top.name not in RUNS:
                assert now == before
            elif code == 2:
                assert now == now | before


def files_below(path: Path) -> dict[Path, bytes]:
    """What stands in a file, or in all files of a folder."""
    return {file: file.read_bytes() for file in [path, *path.rglob("*")] if file.is_file()}


def damage(path: Path, how: str) -> None:
    """Put something instead of a file or folder: `gone`, `half`, `:` and a text, `/old/new/`, ..."""
    before = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "half":
        path.write_bytes(before[:len(before) // 2])
    elif how == "nan":
        saved = saved_in(io.BytesIO(before))
        torch.save(saved | {"server": {"w": torch.tensor([torch.nan])}}, path)
    elif how.startswith(":"):
        path.write_text(how[1:].replace("\\n", "\n"))
    elif how.startswith("/"):
        _, old, new, _ = how.split("/")
        after = re.sub(old.encode(), new.encode(), before)
        assert after != before, f"{path} has no {old}"
        path.write_bytes(after)
    elif how in CONTENTS:
        path.write_bytes(CONTENTS[how])
    elif how != "gone":
        torch.save(TENSORS[how], path)


RUNS = {
    "run": ("fedavg",),
    "lodo": ("fdse", "--protocol", "lodo", "--target", "d0", "--test-rounds", "best"),
    "linear": ("fedgala", "--target", "d0", "--linear-epochs", "1", "--crop", "28"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    def make(place: Path) -> None:
        for name, (method, *flags) in RUNS.items():
            run_here(method, place / name, "--image-size", 28, "--rounds", 2, *flags)
        write_images(place / "images")
        small_folder(place / "small")
    return {path.name: path for path in once(tmp_path_factory, "made", make).iterdir()}


@pytest.fixture
def given(tmp_path, made, monkeypatch) -> Prepared:
    """In a folder of the row's own, where nothing is."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Prepared(tmp_path, made)


def run(words: list[str], place: Path) -> None:
    """Run a method at smoke scale; its folder is `out` if the line names none."""
    flags = ["--scale", "smoke", "--precision", "fp32", "--rounds", "2", "--no-figures", *words[1:]]
    if "--out" not in words:
        flags += ["--out", str(place / "out")]
    if words[0] == "fedgala" and not {"--target", "--sources"} & {*words}:
        flags += one_run(words[0])
    run_all(words[0], PROGRAMS[words[0]].arguments(flags))


def start(words: list[str], place: Path) -> None:
    """What a row's line starts."""
    program, *flags = words
    if program == "run":
        run(flags, place)
    elif program in PROGRAMS:
        PROGRAMS[program].arguments(flags)
    elif program == "flower":
        pytest.importorskip("flwr", reason="needs pip install -r requirements-deploy.txt")
        with one_line_on_failure("deploy.flower"):
            importlib.import_module("deploy.flower").parsed(flags)
    elif program == "build":
        pytest.importorskip("markdown_it", reason="needs pip install -r requirements-docs.txt")
        importlib.import_module("docs.build").main(flags)
    else:
        OTHERS[program].main(flags)


OTHERS = {"tables": reproduce_tables, "measures": measures, "compare": compare, "predict": predict,
          "benchmark": benchmark, "bench": bench}


@pytest.mark.parametrize("line, code, words", ROWS, ids=[line for line, _, _ in ROWS])
def test_bad_inputs(capsys, given, line, code, words):
    found = given.words(line)
    fails(capsys, int(code), rf"^[\w./ -]+: .*{words}", start, found, given.place)
    given.check_unchanged(int(code))


@pytest.mark.parametrize("method", MODULES)
def test_every_number_has_a_least_value(capsys, method):
    """What all methods have is looked at in fedavg alone."""
    shared = () if method == "fedavg" else dataclasses.fields(common.Args)
    for f in dataclasses.fields(MODULES[method].Args):
        if type(f.default) in (int, float) and f not in shared:
            least, flag = f.metadata["low"], flag_of(f.name)
            below = f.metadata["above"] if least is None else least - 1
            fails(capsys, 2, f"{flag} is .*; it must be a", MODULES[method].arguments, [f"{flag}={below}"])
