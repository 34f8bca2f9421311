"""Bad inputs, a row for each: what is given, the exit code, and the words of the one line that answers it.

What a row gives is a command line: a method's flags alone are only parsed, behind `run` the method runs. In
braces stands what is prepared for it: {file}, or {run/result.json=empty}, a finished run whose result.json is
an empty file; see `prepared`.
"""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import common
import reproduce_tables
from bench import bench
from plumbing.settings import flag_of
from reproduce.measures import command as measures
from tests.conftest import MODULES, fails, one_run, run_all, run_here

import pytest
import torch

# Flags of methods

FLAGS = [
    # names
    ("fedavg --tau 1", "--tau is not a flag of fedavg"),
    ("fdse --lamda 1", "--lamda is not a flag of fdse; did you mean --lambda?"),
    ("fdse --no-consensu", "did you mean --no-consensus"),
    ("fedavg --round 3", "--round is not a flag of fedavg; did you mean --rounds?"),
    ("fedavg extra", "extra is not a flag of fedavg"),
    ("fedavg --rounds", "--rounds: expected one argument"),
    # choices
    ("fedavg --dataset officehome2", "--dataset: there are no settings for 'officehome2' here; choose fr"),
    ("fedavg --scale tiny", "--scale: invalid choice: 'tiny'.*laptop.*smoke"),
    ("fedavg --protocol linear", "--protocol: invalid choice: 'linear'.*lodo"),
    ("fedavg --backbone lenet", "--backbone: invalid choice: 'lenet'.*smallcnn"),
    ("fedavg --augment cutout", "--augment: invalid choice: 'cutout'.*fedsr.*jigen"),
    ("fedavg --precision fp16", "--precision: invalid choice: 'fp16'.*bf16"),
    ("fedsr --variant fedprox", "--variant: invalid choice: 'fedprox'.*fedl2r"),
    # numbers: limits are in test_every_number_has_its_limits
    ("fedavg --rounds ten", "--rounds: invalid int value: 'ten'"),
    ("fedavg --rounds 0", "--rounds is 0; it must be a finite number at least 1"),
    ("fedavg --lr 0,1", "--lr: invalid float value: '0,1'"),
    ("fedavg --lr -1", "--lr is -1.0; it must be a finite number above 0"),
    ("fdse --tau 0", "--tau is 0.0.*at least 0.0001"),
    ("fedavg --seed 99999999999999999999", "--seed is 9+; it must be a finite number at least 0 and at most"),
    # values written as text
    ("fedavg --split 0.5/0.5", "--split is 0.5/0.5; expected three positive shares"),
    ("fedavg --split 0.9/0.1/0.1", "--split is 0.9/0.1/0.1; .*sum to 1"),
    ("fedavg --split 1.2/-0.1/-0.1", "--split is 1.2/-0.1/-0.1; .*positive"),
    ("fedavg --split nan/0.5/0.5", "--split is nan/0.5/0.5; expected"),
    ("fedgala --label-ratio 0", "--label-ratio is 0; expected shares between 0 and 1"),
    ("fedgala --label-ratio 0.1/0.1", "--label-ratio is 0.1/0.1; .*each once"),
    ("fedgala --label-ratio 10%", "--label-ratio is 10%; expected shares"),
    ("fedavg --seeds 0,0", "--seeds is 0,0; expected whole numbers from 0 on, each once"),
    # devices
    ("fedavg --device gpu", "--device is gpu; expected auto, cpu, cuda or cuda:N"),
    ("fedavg --device cuda:99", "--device cuda:99 cannot be used here"),
    ("fedavg --device cpu:7", "--device is cpu:7; expected auto, cpu, cuda or cuda:N"),
    ("fedavg --device cpu --precision tf32", "tf32 needs a GPU; the device is cpu: use fp32 or bf16"),
    # values that do not go together
    ("fedavg --seed 1 --seeds 0,1", "--seed and --seeds do not go together"),
    ("fedavg --variant fedcir", "--variant fedcir has no settings for digits; it has for officecaltech"),
    ("fedadg --E0 9 --epochs 3", "--E0 is 9, more than the round's 3 --epochs, of which it is a part"),
    ("fedcir --backbone smallcnn", "--backbone smallcnn has a classifier with a ReLU, .* use smallcnn_bn"),
    ("baselines.centralized --participation 0.5", "all images in each round: --participation is 1"),
    ("baselines.scaffold --momentum 0.9", "--momentum 0.9 does not go with SCAFFOLD"),
]

# Runs that cannot start

RUNS = [
    ("fedavg --protocol lodo --target d7", 2, "--target d7 is not a domain of digits; its domains are d0, d"),
    ("fedavg --target d15", 2, "--target d15 goes with --protocol lodo; the protocol is indomain"),
    ("fedavg --dataset pacs --protocol lodo --target photos", 2, "photos is not a domain of pacs; its dom"),
    ("fedavg --archives /no/such/folder", 2, "--archives /no/such/folder is not a folder"),
    ("fedavg --backbone resnet18", 2, "resnet18 takes colour images; those of digits have one channel"),
    ("fdse --backbone smallcnn", 2, "fdse builds alexnet_bn .colour images., smallcnn_bn, resnet18"),
    ("fedavg --normalize imagenet", 2, "--normalize imagenet is for colour images; those of digits have one"),
    ("fedavg --backbone smallcnn --weights imagenet", 2, "no ImageNet weights for --backbone smallcnn; ther"),
    ("fedavg --backbone smallcnn --image-size 8", 2, "smallcnn needs images of at least 16x16, not 8x8"),
    ("fedavg --weights /no/such/file.pt", 2, "/no/such/file.pt: no such file of weights"),
    ("fedavg --weights {file}", 1, "file.txt cannot be read as a file of weights: it is damaged or holds mo"),
    ("fedavg --weights ''", 2, "--weights is empty; expected none, imagenet or a file of weights"),
    ("fedavg --weights {weights=number}", 2, "is no file of weights: expected a dict of names and tensors"),
    ("fedavg --weights {weights=list}", 2, "is no file of weights: expected a dict of names and tensors"),
    ("fedavg --weights {weights=other}", 2, "does not fit the network: .* tensors are missing or do not fit"),
    ("fedavg --limit 5", 1, "d0 has 5 images, fewer than the 10 classes; raise --limit"),
    ("fedavg --clients-per-domain 30", 1, "needs at least 2/1/1: fewer --clients-per-domain"),
    ("fedavg --split 0.98/0.01/0.01", 1, "needs at least 2/1/1"),
    ("fedavg --dirichlet 1", 2, "--dirichlet 1.0 needs several clients in a domain: set --clients-per-domai"),
    ("fedavg --dirichlet 1e-9 --clients-per-domain 4", 1, "needs at least 2/1/1.*a larger --dirichlet"),
    ("fedavg --protocol lodo --target d0 --target-part test --limit 15", 1, "d0 has 1 images to test; it ne"),
    ("fedgala --target d0 --label-ratio 0.99", 2, "none of which is left to test with 0.99 of the labels: l"),
    ("baselines.lgfedavg --layers 9", 2, "--layers is 9; --backbone smallcnn_bn has 4 layers"),
    # --out
    ("fedavg --out {file}", 1, "File exists: .*file.txt; a file is where a folder"),
    ("fedavg --out {folder}", 2, "foreign has files that are of no run .metrics.jsonl.: give another --out"),
    ("fedavg --out {run} --lr 0.2", 2, "holds a run of other arguments .lr 0.05, not 0.2.: give another --o"),
    ("baselines.fedprox --out {run}", 2, "holds a run of other arguments .*method fedavg, not fedprox"),
    # --record
    ("fedavg --record {file}", 2, "--record .*file.txt is no JSONL file .it begins with b'a'"),
    ("fedavg --record {folder}", 1, "Is a directory: .*foreign; a folder is where a file is expected"),
    ("fedavg --record {file}/x", 1, "File exists: .*file.txt; a file is where a folder is expected"),
    # damaged files of a run; what else a checkpoint may lack is in test_runfolder.py
    ("fedavg --out {run/checkpoint.pt=half}", 1, "checkpoint.pt cannot be read .*or --no-resume to replace"),
    ("fedavg --out {run/checkpoint.pt=text}", 1, "checkpoint.pt cannot be read .*or --no-resume to replace"),
    ("fedavg --out {run/checkpoint.pt=other}", 1, "checkpoint.pt is no whole checkpoint.*--no-resume to rep"),
    ("fedavg --out {run/checkpoint.pt=folder}", 1, "checkpoint.pt .*give another --out"),
    ("fedavg --no-resume --out {run/metrics.jsonl=folder}", 1, "metrics.jsonl; .*give"),
    ("fedavg --out {run/result.json=folder}", 1, "result.json"),
]

# Other programs

OTHERS = [
    ("tables --only fdse-77", 2, "--only fdse-77 is no table; there are fedsr-1"),
    ("tables --seeds 0", 2, "--seeds is 0; it must be at least 1"),
    ("tables --seeds 99999999999", 2, "--seeds is 99999999999; .*at most 9999"),
    ("tables --gpus foo", 2, "--gpus is foo; expected numbers of GPUs such as 0,1"),
    ("tables --jobs 0", 2, "--jobs is 0; it must be at least 1"),
    ("tables --sample nan --check", 2, "--sample is nan; it must be a finite number at least 0"),
    ("tables --plan --run", 2, "--run: not allowed with argument --plan"),
    ("tables --rnu", 2, "--rnu is not a flag of reproduce_tables; did you mean --run?"),
    ("tables --records other.jsonl", 2, "with other --tables or --records give another --out too"),
    ("tables --records {folder} --out x", 2, "--records .*foreign is a folder; expected a JSONL file"),
    ("tables --records mine.jsonl --out x", 2, "--records mine.jsonl: no such file of finished runs"),
    ("tables --tables nowhere --out x", 2, "nowhere has no tables"),
    ("measures paint {run}", 2, "invalid choice: 'paint'"),
    ("measures risk {run} --accuracy 0.5", 2, "--accuracy is not a flag of measures"),
    ("measures adaptation {run}", 2, "has no flags that act on a left-out domain alone: give a run of fdse"),
    ("measures adaptation {lodo} --flags '--adapt-lr x'", 2, "--adapt-lr: invalid float value: 'x'"),
    ("measures adaptation {lodo} --record {folder}", 1, "Is a directory: .*foreign"),
    ("measures tsne {run} --images 3", 2, "--images is 3; it must be at least 4"),
    ("measures cost {run} --accuracy 60", 2, "the accuracy to reach is 60.0; expected a share"),
    ("measures gradients {run} --batches 0", 2, "--batches is 0; it must be at least 1"),
    ("measures risk {run} --which newest", 2, "--which: invalid choice: 'newest'"),
    ("measures pad {run} --out a.png", 2, "give two folders, not 1"),
    ("measures risk {run} --out a.txt", 2, ".png, .pdf or .svg"),
    ("measures risk {run} --json {folder}", 1, "Is a directory: .*foreign; a folder is where"),
    ("measures risk {run} --out {file}/x.png", 1, "File exists: .*/file.txt; .*give another f"),
    ("measures pad {run}", 2, "needs 4 images of each domain.*--part all"),
    ("measures risk {tmp}/nowhere", 2, "result.json is missing or damaged"),
    ("measures risk {run/result.json=empty}", 2, "result.json is missing or damaged"),
    ("measures risk {run/result.json=null}", 2, "result.json is missing or damaged"),
    ("measures pad {run/best.pt=gone}", 2, "best.pt: no such file of checkpoint"),
    ("measures pad {run/best.pt=half}", 1, "best.pt cannot be read as a file of checkpoint"),
    ("measures risk --which last {run/checkpoint.pt=gone}", 2, "has no checkpoint.pt, the state of a run"),
    ("bench --rounds 0", 2, "bench: --rounds is 0; it must be at least 1"),
    ("bench --only fedprox", 2, "--only: invalid choice: 'fedprox'"),
    ("bench --views --methods", 2, "--methods and --views are benchmarks of their own; give one of them"),
    ("bench --device gpu", 2, "bench: --device is gpu; expected auto, cpu, cuda or cuda:N"),
    ("bench --views --only fdse", 2, "--only goes with the rounds of Office-Caltech10"),
    ("bench --archives /no/such", 2, "--archives /no/such is not a folder"),
]

# What the environment says

ENVIRONMENT = [
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', but the processes cannot meet"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "no"},
     "WORLD_SIZE is '2', but the processes cannot meet"),
]

# What stands in braces


def half_of(whole: bytes) -> bytes:
    return whole[:len(whole) // 2]


# What a file of a run is replaced by: a content, or a function of what it was.
CONTENTS = {
    "empty": b"",
    "half": half_of,
    "text": b"a,b\n1,2\n",
    "null": b"null",
}
# Files of torch that are nothing of a run.
TENSORS = {
    "number": 3,
    "list": [torch.zeros(2)],
    "other": {"body.x": torch.zeros(2)},
}


class Prepared:
    """What rows find in a folder of their own; `runs` has the finished runs that they get copies of."""

    def __init__(self, place: Path, runs: dict[str, Path]):
        self.place, self.runs = place, runs
        self.texts = {}  # {file: what stands in it}

    def fill(self, text: str) -> str:
        """The text with a path for each pair of braces."""
        return re.sub(r"\{([^}]*)\}", lambda found: str(self.path(found[1])), text)

    def path(self, what: str) -> Path:
        """The path of `tmp`, `file`, `folder`, `weights=list`, `run`, `run/best.pt=half`, ..."""
        name, _, change = what.partition("/")
        if what == "tmp":
            return self.place
        if what == "file":
            return self.written("file.txt", "a,b\n1,2\n")
        if what == "folder":
            (self.place / "foreign").mkdir()
            self.written("foreign/metrics.jsonl", "mine")
            return self.place / "foreign"
        if what.startswith("weights="):
            torch.save(TENSORS[what.partition("=")[2]], self.place / "weights.pt")
            return self.place / "weights.pt"
        folder = shutil.copytree(self.runs[name], self.place / name)
        if change:
            file, _, how = change.partition("=")
            damage(folder / file, how)
        return folder

    def written(self, name: str, text: str) -> Path:
        (self.place / name).write_text(text)
        self.texts[self.place / name] = text
        return self.place / name

    def check_unchanged(self) -> None:
        """Nothing that is of no run was changed, and nothing came beside it."""
        for path, text in self.texts.items():
            assert path.read_text() == text
        if (self.place / "foreign").exists():
            assert [path.name for path in (self.place / "foreign").iterdir()] == ["metrics.jsonl"]


def damage(path: Path, how: str) -> None:
    """Replace a file of a run."""
    before = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how in CONTENTS:
        content = CONTENTS[how]
        path.write_bytes(content(before) if callable(content) else content)
    elif how != "gone":
        torch.save(TENSORS[how], path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    run_here("fedavg", place / "run")
    lodo = ("--protocol", "lodo", "--target", "d0", "--no-figures", "--test-rounds", "best")
    run_here("fdse", place / "lodo", *lodo)
    return {name: place / name for name in ("run", "lodo")}


@pytest.fixture
def given(tmp_path, runs, monkeypatch) -> Prepared:
    """In a folder of the row's own, where nothing is."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Prepared(tmp_path, runs)


@pytest.fixture(scope="module", autouse=True)
def digits_once():
    """Runs on digits share them: they are turned once for all rows."""
    domains, plain = {}, common.load_digits

    def again(size: int) -> list:
        if size not in domains:
            domains[size] = plain(size)
        return domains[size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "load_digits", again)
        yield


# They are answered


def parse(words: list[str]) -> None:
    MODULES[words[0]].arguments(words[1:])


@pytest.mark.parametrize("line, words", FLAGS, ids=[line for line, _ in FLAGS])
def test_bad_flags_of_methods(capsys, line, words):
    fails(capsys, 2, f"^{line.split()[0].removeprefix('baselines.')}: .*{words}", parse, shlex.split(line))


def run_line(words: list[str], place: Path) -> None:
    """Run a method at smoke scale; its folder is `run` if the line names none."""
    flags = ["--scale", "smoke", "--precision", "fp32", "--rounds", "2", "--no-figures", *words[1:]]
    if "--out" not in words:
        flags += ["--out", str(place / "out")]
    if words[0] == "fedgala" and not {"--target", "--sources"} & {*words}:
        flags += one_run(words[0])
    run_all(words[0], MODULES[words[0]].arguments(flags))


@pytest.mark.parametrize("line, code, words", RUNS, ids=[line for line, _, _ in RUNS])
def test_runs_that_cannot_start(capsys, given, line, code, words):
    filled = shlex.split(given.fill(line))
    fails(capsys, code, words, run_line, filled, given.place)
    assert not list(given.place.rglob("*.tmp")) and not (given.place / "out" / "metrics.jsonl").exists()
    given.check_unchanged()


PROGRAMS = {
    "tables": reproduce_tables.main,
    "measures": measures.main,
    "bench": bench.main,
}


@pytest.mark.parametrize("line, code, words", OTHERS, ids=[line for line, _, _ in OTHERS])
def test_bad_inputs_of_other_programs(capsys, given, line, code, words):
    program, *flags = shlex.split(given.fill(line))
    fails(capsys, code, words, PROGRAMS[program], flags)
    assert not list(given.place.rglob("*.tmp"))
    given.check_unchanged()


@pytest.mark.parametrize("environment, words", ENVIRONMENT, ids=[str(row) for row, _ in ENVIRONMENT])
def test_bad_environments(capsys, given, monkeypatch, environment, words):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fails(capsys, 2, words, run_line, ["fedavg"], given.place)


# Every number


def numbers_of(method: str) -> list[dataclasses.Field]:
    """The fields of a method that are numbers; what all have is looked at in fedavg alone."""
    fields = []
    for f in dataclasses.fields(MODULES[method].Args):
        everywhere = f.name in {one.name for one in dataclasses.fields(common.Args)}
        if type(f.default) in (int, float) and (method == "fedavg" or not everywhere):
            fields.append(f)
    return fields


def beyond(f: dataclasses.Field) -> dict[str, str]:
    """{a value that a number cannot have: words of the answer}."""
    flag, kind, limits = flag_of(f.name), type(f.default), f.metadata
    bad = dict.fromkeys(["", "1,5"], f"{flag}: invalid {kind.__name__} value")
    if kind is int:
        bad |= dict.fromkeys(["nan", "0.5"], f"{flag}: invalid int value")
        highest = limits["high"]
        bad[str(highest + 1)] = f"{flag} is {highest + 1}; it must be a finite number .*at most {highest}"
    else:
        for value in ("nan", "-inf"):
            bad[value] = f"{flag} is {value}; it must be a finite number"
        bad["1e999"] = f"{flag} is inf; it must be a finite number"
    if kind is float and limits["high"] is not None:
        bad[str(limits["high"] + 0.5)] = f"{flag} is .*; it must be .*at most {limits['high']}"
    if limits["low"] is not None:
        bad[str(limits["low"] - 1)] = f"{flag} is .*; it must be .*at least {limits['low']}"
    if limits["above"] is not None:
        bad[str(limits["above"])] = f"{flag} is .*; it must be .*above {limits['above']}"
    return bad


@pytest.mark.parametrize("method", MODULES)
def test_every_number_has_its_limits(capsys, method):
    for f in numbers_of(method):
        limits = f.metadata
        assert limits["low"] is not None or limits["above"] is not None, f"{f.name} has no least value"
        for value, words in beyond(f).items():
            fails(capsys, 2, words.replace("+", "[+]"), parse, [method, f"{flag_of(f.name)}={value}"])
