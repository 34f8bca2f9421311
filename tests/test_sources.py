"""Which code made a number: what the hash of the sources sees, and what a folder of other code's run does."""

import json
import subprocess
import textwrap

import fedavg
from plumbing import provenance, sources
from plumbing.errors import Stop
from tests.conftest import METHODS, MODULES, fails, interrupted, metrics, parsed, run_here

import pytest

METHOD = '''
"""A method."""
import common
from common import average

MNIST = dict(rounds=9)
PAPER = {"digits": dict(lr=0.1), "mnist": MNIST}
SAM = dict(eps=0.5)


class Args(common.Args):
    mu: float = 0.1
    views: ClassVar[int] = 1

    def weight(self, t):
        """Of round t."""
        return self.mu * 0.9 ** t


def term(x, mu):
    """The term."""
    if mu < 0:
        raise ValueError(f"mu is {mu}")
    OWN = dict(steps=3)
    return mu * x  # Eq. (1)
'''


def hash_of(path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    sources.hash_of.cache_clear()
    return sources.hash_of(path)


@pytest.fixture
def method(tmp_path, monkeypatch):
    """A repository of one method and a common.py; the file of the method."""
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    common = "from plumbing import augment, errors\ndef average(x): return x.mean()"
    (tmp_path / "common.py").write_text(common)
    (tmp_path / "plumbing").mkdir()
    (tmp_path / "plumbing" / "augment.py").write_text("FLIP = 0.5")
    (tmp_path / "plumbing" / "errors.py").write_text("WIDTH = 80")
    yield tmp_path / "method.py"
    sources.hash_of.cache_clear()


@pytest.mark.parametrize("old,new", [
    ('"""A method."""', '"""Another sentence."""'),
    ("# Eq. (1)", "# the first equation"),
    ("mu is {mu}", "--mu is {mu}, below 0"),
    ("lr=0.1", "lr=0.2"),
    ("rounds=9", "rounds=8"),
    ("mu: float = 0.1", "mu: float = 0.3"),
    ("    return mu * x  # Eq. (1)", "\n    return (mu * x)"),
])
def test_what_cannot_change_a_number_is_not_in_the_hash(method, old, new):
    assert METHOD.count(old) == 1
    assert hash_of(method, METHOD.replace(old, new)) == hash_of(method, METHOD)


@pytest.mark.parametrize("old,new", [
    ("mu * x", "x * mu"),
    ("mu < 0", "mu < 1"),
    ("import average", "import state"),
    ("0.9 ** t", "0.8 ** t"),
    ("ClassVar[int] = 1", "ClassVar[int] = 2"),
    ("eps=0.5", "eps=0.6"),
    ("steps=3", "steps=4"),
])
def test_every_other_change_is(method, old, new):
    assert hash_of(method, METHOD.replace(old, new)) != hash_of(method, METHOD)


def test_the_hash_follows_the_imports(method):
    before = hash_of(method, METHOD)
    (method.parent / "plumbing" / "errors.py").write_text("WIDTH = 90")
    assert hash_of(method, METHOD) == before
    (method.parent / "plumbing" / "augment.py").write_text("FLIP = 0.6")
    changed = hash_of(method, METHOD)
    assert changed != before
    (method.parent / "common.py").write_text("def average(x): return x.median()")
    assert hash_of(method, METHOD) not in (before, changed)


@pytest.mark.parametrize("text", [
    "T = dict(k=3)\nPAPER = {'d': T}\ndef f(): return T['k']",
    "K = PAPER = {'k': 3}\ndef f(): return K",
    "PAPER = {'d': dict(k=3)}\ndef f(): return PAPER['d']",
    "class Args:\n    k: int = field(init=False, default=3)",
    "class Args:\n    k: CV[int] = 3",
    "class Net:\n    class Args:\n        k: int = 3",
])
def test_a_setting_that_the_code_reads_is_in_the_hash(method, text):
    assert hash_of(method, text) != hash_of(method, text.replace("3", "4"))


@pytest.mark.parametrize("line", ["from .helper import scale", "from . import helper",
                                  "from baselines.helper import scale", "from ..baselines import helper",
                                  "import baselines.helper"])
def test_an_import_may_have_dots(method, line):
    folder = method.parent / "baselines"
    folder.mkdir()
    found = []
    for scale in (1, 1, 2):
        (folder / "helper.py").write_text(f"scale = {scale}")
        found.append(hash_of(folder / "method.py", line))
    assert found[0] == found[1] != found[2]


def test_a_table_of_numbers_is_in_the_hash(method):
    """Which digits RotatedMNIST has."""
    before = hash_of(method, METHOD)
    (method.parent / "plumbing" / "rows.csv").write_text("1,2")
    assert hash_of(method, METHOD) != before


def test_each_method_has_its_own_hash():
    assert len({sources.hash_of(sources.method_file(parsed(name))) for name in METHODS}) == len(MODULES)
    files = [path.name for path in sources.files_of(sources.method_file(parsed("baselines.fedema")))]
    assert {"fedema.py", "fedgala.py", "common.py", "augment.py"} <= set(files)
    assert not {"settings.py", "runfolder.py"} & set(files)


def test_sources_may_be_known_to_give_the_same_numbers(tmp_path, monkeypatch):
    """All of a set; a file that is none is named."""
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    assert sources.equivalent_to("a") == {"a"}
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "equivalent_sources.toml"
    path.write_text("".join(f'[[same]]\nmethod = "fdse"\nsources = {list(same)}\n' for same in ("xy", "bcd")))
    assert sources.equivalent_to("d") == sources.equivalent_to("b") == {"b", "c", "d"}
    assert sources.equivalent_to("a") == {"a"}
    path.write_text("[[same]]\n")
    with pytest.raises(Stop, match="equivalent_sources.toml has no sets of hashes"):
        sources.equivalent_to("d")


# Folders


def test_a_run_says_by_which_code_it_is(tmp_path, monkeypatch):
    """Of each start of the run: round, sources, commit and threads."""
    flags = ["--rounds", "3", "--checkpoint-every", "0"]
    interrupted("fedavg", monkeypatch, tmp_path, *flags, after=1)
    result = run_here("fedavg", tmp_path, *flags)
    now = sources.hash_of(sources.method_file(parsed("fedavg")))
    assert [part["from"] for part in result["code"]] == [1, 2]
    for part in result["code"]:
        assert part.keys() == {"from", "sources", "commit", "uncommitted_changes", "threads", "precision",
                               "load"}
        assert part["precision"] == "fp32" and part["threads"] == 1 and part["load"] >= 0
        assert part["sources"] == result["sources"] == now and part["commit"] == result["commit"]


def edited(monkeypatch) -> None:
    """As if fedavg.py had been changed since."""
    monkeypatch.setattr("plumbing.runfolder.hash_of", lambda file: "0123456789ab")
    monkeypatch.setattr("plumbing.provenance.hash_of", lambda file: "0123456789ab")


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_by_other_code_is_refused(tmp_path, monkeypatch, capsys, finished):
    flags = ["--rounds", "3", "--checkpoint-every", "0"]
    if finished:
        run_here("fedavg", tmp_path, *flags)
    else:
        interrupted("fedavg", monkeypatch, tmp_path, *flags, after=1)
    capsys.readouterr()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    edited(monkeypatch)
    words = r"holds a run by other code \(sources \w{12}; here 0123456789ab\).*--no-resume.*--any-code"
    fails(capsys, 2, words, run_here, "fedavg", tmp_path, *flags)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_folder_of_equivalent_code_is_gone_on_with(tmp_path, monkeypatch):
    flags = ["--rounds", "3", "--checkpoint-every", "0"]
    interrupted("fedavg", monkeypatch, tmp_path, *flags, after=1)
    before = sources.hash_of(sources.method_file(parsed("fedavg")))
    edited(monkeypatch)
    monkeypatch.setattr(sources, "read_equivalents", lambda path: [("fedavg", [before, "0123456789ab"])])
    assert [part["from"] for part in run_here("fedavg", tmp_path, *flags)["code"]] == [1, 2]


def test_any_code_goes_on_and_says_so(tmp_path, monkeypatch):
    flags = ["--rounds", "3", "--checkpoint-every", "0"]
    interrupted("fedavg", monkeypatch, tmp_path, *flags, after=1)
    edited(monkeypatch)
    result = run_here("fedavg", tmp_path, *flags, "--any-code")
    first, second = result["code"]
    del first["load"], second["load"]
    assert second == first | {"from": 2, "sources": "0123456789ab"} and first["sources"] != second["sources"]


def test_no_resume_runs_it_anew(tmp_path, monkeypatch):
    run_here("fedavg", tmp_path)
    edited(monkeypatch)
    result = run_here("fedavg", tmp_path, "--no-resume")
    assert [part["sources"] for part in result["code"]] == ["0123456789ab"]
    assert len(metrics(tmp_path)) == result["last"]["round"]


def test_a_result_without_its_code_is_refused_too(tmp_path, capsys):
    """A folder from before records knew their code."""
    run_here("fedavg", tmp_path)
    (tmp_path / "checkpoint.pt").unlink()
    result = json.loads((tmp_path / "result.json").read_text())
    del result["code"], result["sources"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    fails(capsys, 2, r"other code \(sources unknown; here", run_here, "fedavg", tmp_path)


def test_a_run_is_recorded_once_by_each_code(tmp_path, monkeypatch):
    record = tmp_path / "runs.jsonl"
    run_here("fedavg", tmp_path / "a", "--record", record)
    run_here("fedavg", tmp_path / "b", "--record", record)
    assert len(record.read_text().splitlines()) == 1
    edited(monkeypatch)
    run_here("fedavg", tmp_path / "c", "--record", record)
    first, second = [json.loads(line) for line in record.read_text().splitlines()]
    assert first["id"] == second["id"] and first["sources"] != second["sources"]
    assert first["method"] == fedavg.__name__


def test_git_is_asked_without_a_lock(monkeypatch):
    """While a run asks for the state of the files, somebody may commit."""
    asked = []
    done = subprocess.CompletedProcess([], 0, stdout="abc\n")
    monkeypatch.setattr(provenance.subprocess, "run", lambda words, **how: asked.append(words) or done)
    assert provenance.git("status") == "abc"
    assert asked[0][:2] == ["git", "--no-optional-locks"] and asked[0][-1] == "status"
