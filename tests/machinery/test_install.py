"""The package that `pip install .` makes, and the frozen environment."""

import re
import subprocess
import sys
import tomllib

from plumbing.run import provenance
from tests.conftest import ROOT, write_files
from tests.machinery.test_architecture import METHOD_FILES, tracked

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGED = PROJECT["tool"]["setuptools"]
MINE = """
import fedavg
from common import run

class Client(fedavg.Client):
    pass

if __name__ == "__main__":
    run(fedavg.Server, Client, fedavg.arguments())
"""


def test_all_code_that_a_run_needs_is_in_the_package():
    """And the files that it reads beside it."""
    modules = {f"{name}.py" for name in PACKAGED["py-modules"]}
    assert modules == {*METHOD_FILES, "common.py", "reproduce_tables.py"}
    tops = {name for name in PACKAGED["packages"] if "." not in name}
    assert tops == {*provenance.FOLDERS}
    folders = {name.replace(".", "/") for name in PACKAGED["packages"]}
    floors = ("plumbing", "reproduce", "baselines", "official", "deploy")
    files = [path for path in tracked() if path.startswith(tuple(f"{floor}/" for floor in floors))]
    assert {path.rpartition("/")[0] for path in files if path.endswith(".py")} == folders
    beside = {path for path in files if not path.endswith((".py", ".jinja"))}
    for_the_clone = {"deploy/README.md", "deploy/nginx.conf", "deploy/app/pyproject.toml"}
    assert beside - for_the_clone == {"plumbing/data/catalog.toml", "plumbing/run/scales.toml",
                                      "plumbing/data/rotated_mnist_indices.csv"}


def test_every_module_that_makes_a_number_is_in_the_hash():
    """All of plumbing/, whatever its folder."""
    hashed = {str(path.relative_to(ROOT)) for path in provenance.files_of(ROOT / "fdse.py")}
    below = {path for path in tracked() if path.startswith("plumbing/") and path.endswith((".py", ".csv"))}
    assert hashed == below | {"common.py", "fdse.py"} and len(below) > 20


def test_the_lock_has_every_requirement_with_a_hash():
    """At least as new as requirements.txt asks."""
    pins, hashed = {}, set()
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        pin = re.match(r"([\w.-]+)==(\S+)", line)
        if pin:
            name, version = pin.groups()
            pins[name] = version
        elif re.match(r"    --hash=sha256:[0-9a-f]{64}", line):
            hashed.add(name)
    assert hashed == set(pins)
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            needed = Requirement(line.split()[0])
            assert needed.specifier.contains(pins[canonicalize_name(needed.name)])


def test_versions_agree():
    version = PROJECT["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_commit_is_not_that_of_another_repository(tmp_path, monkeypatch):
    """Of GIT_DIR, or of one around it: where pip has installed it in somebody's repository."""
    ours = provenance.git("rev-parse", "HEAD")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "theirs"]
    subprocess.run(["git", "-C", tmp_path, *commit], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert provenance.git("rev-parse", "HEAD") == ours
    write_files(tmp_path, {"inner/pyproject.toml": '[project]\nversion = "9"\n'})
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "inner")
    assert provenance.git("rev-parse", "HEAD") is None
    monkeypatch.setattr(provenance, "files_of", lambda file: [])
    made_by = provenance.code(ROOT / "fedavg.py")  # nobody knows what has changed
    assert (made_by["commit"], made_by["dirty"]) == ("unknown", None)
    assert provenance.version_line().startswith("CleanFDG 9, torch ")


def test_beside_other_libraries_only_this_package_makes_the_numbers(tmp_path, monkeypatch):
    """Where pip has installed it. The folder of a method of one's own counts, to the end of its imports."""
    site, mine = tmp_path / "site", tmp_path / "mine"
    write_files(site, {"common.py": "import plumbing.run.seeding",
                       "plumbing/run/seeding.py": "import torch.nn",
                       "fedavg.py": "import common, torch.nn", "torch/nn.py": ""})
    write_files(mine, {"mine.py": "import fedavg, helper, torch.nn", "helper.py": "import end",
                       "end.py": "import mine"})
    monkeypatch.setattr(provenance, "ROOT", site)
    package = [site / "common.py", site / "fedavg.py", site / "plumbing/run/seeding.py"]
    assert provenance.files_of(site / "fedavg.py") == package
    assert provenance.files_of(mine / "mine.py") == [mine / "end.py", mine / "helper.py", mine / "mine.py",
                                                     *package]


@pytest.mark.slow
def test_a_method_elsewhere_imports_the_installed_package(tmp_path):
    """Installed without the network, into a folder: of a copy, in which the building leaves its files."""
    copy, there, work = tmp_path / "copy", tmp_path / "site", tmp_path / "work"
    for path in tracked():
        if not path.startswith(("results/", "tests/", "docs/")):
            write_files(copy, {path: (ROOT / path).read_bytes()})
    words = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run([sys.executable, *words, there, copy], check=True)
    write_files(work, {"mine.py": MINE})
    commands = [
        ["mine.py", "--scale", "smoke", "--no-figures", "--out", "run"],
        ["-m", "baselines.fedprox", "--scale", "smoke", "--no-figures", "--out", "prox"],
        ["mine.py", "--version"],
        ["-c", "from reproduce.loading import load_run; load_run('prox')"],
    ]
    said = []
    for command in commands:
        done = subprocess.run([sys.executable, *command], cwd=work, env={"PYTHONPATH": str(there)},
                              check=True, capture_output=True, text=True)
        said.append(done.stdout)
    assert said[0].startswith("mine on digits") and said[1].startswith("fedprox on digits")
    assert said[2].startswith(f"mine: CleanFDG {PROJECT['project']['version']}, torch ")
