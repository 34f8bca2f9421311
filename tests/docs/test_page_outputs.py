"""The outputs and figures of docs/start.md and docs/own.md are the program's: as the commands stand there, or
quickly after a round, except for the settings that this changes."""

import common
from tests.conftest import ROOT, start_here, write_files
from tests.page_outputs import FIGURES, files_of, programs, renewed, shown, started

import pytest

pytestmark = pytest.mark.usefixtures("in_this_process")

SHOWN = [(name, block, output) for name in ("start", "own")
         for block, output in shown((ROOT / f"docs/{name}.md").read_text()).items()]
# All benchmarks print the same lines: the quick suite runs that of one's own file.
SLOW = [pytest.mark.slow]
CASES = [pytest.param(one, marks=SLOW * ("benchmark" in one[1] and "one.py" not in one[1])) for one in SHOWN]
FEW = "--rounds 1 --epochs 1 --image-size 8 --no-figures"


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}: {case[1].splitlines()[0][:60]}")
def case(request, tmp_path, monkeypatch):
    """The commands of a page in a folder with its files, and their output."""
    name, block, output = request.param
    write_files(tmp_path, files_of(name))
    monkeypatch.chdir(tmp_path)
    return programs(block), output


@pytest.fixture
def small_domains(monkeypatch):
    """Each domain has a few images, each another number: else AVG is ALL."""
    whole = common.open_dataset

    def opened(args) -> common.Dataset:
        dataset = whole(args)
        for size, domain in enumerate(dataset.domains, 4):
            domain.images, domain.labels = domain.images[:10 * size], domain.labels[:10 * size]
        return dataset
    monkeypatch.setattr(common, "open_dataset", opened)


def quick(words: list[str]) -> list[str]:
    """The words of a command that trains for a round."""
    if "reproduce.benchmark" in words:
        flags = words.index("--flags") + 1
        return [*words[:flags], f"{words[flags]} {FEW}", *words[flags + 1:], "--jobs", "1"]
    return words if "reproduce.compare" in words else [*words, *FEW.split()]


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # a program is started where it is imported
def test_the_program_prints_such_lines(case, small_domains, monkeypatch, capsys):
    commands, output = case
    for words in map(quick, commands):
        start_here(monkeypatch, words if words[0] == "-m" else [str(ROOT / words[0]), *words[1:]])
    said = capsys.readouterr()
    lines = [line for line in output.splitlines() if not line.startswith("  ")]
    renewed("\n".join(lines), said.out + said.err)


@pytest.mark.slow
def test_the_commands_of_the_page_print_them(case, tmp_path):
    commands, output = case
    renewed(output, "".join(started(words, tmp_path) for words in commands))


def test_a_line_that_the_program_does_not_print_is_noticed():
    said = "runs: 0%\rruns: 100%\nd75  70.1 +- 2.0    above\n"
    page = "d75  9.00 +- 10.12  cannot be told apart\n"
    assert renewed(page, said) == "d75  70.1 +- 2.0    above\n"
    assert renewed("runs: ...\n", said) == "runs: ...\n"
    with pytest.raises(AssertionError, match="no line like this one"):
        renewed("d75  9.00 +- 1.00\n", said)


def test_a_table_of_the_page_is_an_output():
    page = (ROOT / "docs/start.md").read_text()
    assert "".join(shown(page).values()).count("|---|") == page.count("|---|") > 0


def test_each_figure_is_made_by_a_command():
    """And nothing else lies beside the page of one's own files."""
    assert {path.name for path in (ROOT / "docs/own").iterdir()} == {
        name.removeprefix("own/") for name in FIGURES if name.startswith("own/")}
