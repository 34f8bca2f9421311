"""What docs/start.md and docs/own.md show of the program: its output below a command, and its figures.

    python -m tests.page_outputs      # runs their commands in empty folders and rewrites it: half an hour

A fence or a table below a command has lines of its output, not all of them. A number of the page stands for
any number, `...` for any text, device and precision for those of any machine, a table's lines for spaces.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.commands import FENCED, commands_of_line
from tests.conftest import ROOT, write_files

FIGURES = {"start_curves.png": "runs/fedavg-digits-indomain-paper-s0-*/curves.png",
           "own/coral.png": "runs/benchmark-digits-without-d75/forest.png",
           "own/coral.csv": "runs/benchmark-digits-without-d75/benchmark.csv",
           "own/wine.png": "runs/benchmark-wine-without-all/forest.png", "own/networks.png": "networks.png"}
MACHINE = r"(?:cpu|cuda:\d+), (?:fp32|bf16)"  # of the first lines of a run
VERDICT = "above|below|cannot be told apart"
TOKENS = {r"\.\.\.": ".*", r"[ |]*\|[ |]*": "[ |]*", r"[+-]?\d[\d.,:]*": r"[+-]?\d[\d.,:]*", " +": " +",
          "s/round|round/s": "s/round|round/s",
          MACHINE: MACHINE,
          f"(?:{VERDICT})(?:; corrected: (?:{VERDICT}))?": f"(?:{VERDICT})(?:; corrected: (?:{VERDICT}))?"}
TOKEN = re.compile(f"({'|'.join(TOKENS)})")


def blocks(page: str, language: str = "") -> list[str]:
    """The fenced blocks of a page in a language."""
    return [block for found, block in FENCED.findall(page) if found == language]


def shown(page: str) -> dict[str, str]:
    """Each block of commands above an output or a figure, and that output, a fence or tables, or nothing."""
    found, commands = {}, ""
    parts = FENCED.split(page)
    for language, block, text in zip(parts[1::3], parts[2::3], parts[3::3]):
        if not language and commands_of_line(block.splitlines()[0]):
            commands = block
        elif not language:
            found[commands] = block
        tables = re.match(r"\n\n((?:\|.*\n|\n(?=\|))+)", text)
        if tables:
            found[commands] = tables[1]
        elif "![" in text:
            found.setdefault(commands, "")
    return found


def programs(block: str) -> list[list[str]]:
    """The words behind `python` of each command of a block."""
    return [list(words[1:]) for line in block.splitlines() for words in commands_of_line(line)]


def files_of(name: str) -> dict[str, str]:
    """The files that a reader of the page writes, by their names."""
    page = (ROOT / f"docs/{name}.md").read_text()
    if name == "start":
        return {"one.py": applied(blocks(page, "diff")[0], (ROOT / "fedavg.py").read_text())}
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL))


def applied(diff: str, text: str) -> str:
    """A text after a diff without numbers of lines: each hunk stands where its lines of context do."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, f"{text.count(before)} times in the file:\n{before}"
        text = text.replace(before, after)
    return text


def renewed(output: str, said: str) -> str:
    """The lines of an output on a page as the program has now said them; an error if it says no such line."""
    lines, new = re.split(r"[\r\n]+", said), []
    for line in output.splitlines():
        if not line.strip("|-"):
            new.append(line + "\n")  # of a table, between its head and its rows
            continue
        parts = TOKEN.split(line)
        pattern = "".join(f"({loosely(part)})" for part in parts)
        same = [match for match in (re.fullmatch(pattern, one) for one in lines) if match]
        assert same, f"the program prints no line like this one:\n{line}\nbut\n{said}"
        now = zip(parts, same[0].groups())
        new.append("".join(part if part == "..." or "|" in part else words for part, words in now) + "\n")
    return "".join(new)


def loosely(part: str) -> str:
    """The expression of what a part of a line stands for."""
    for token, stands_for in TOKENS.items():
        if re.fullmatch(token, part):
            return stands_for
    return re.escape(part)


def started(words: list[str], folder: Path) -> str:
    """What a program prints in a folder, one thread."""
    if (ROOT / words[0]).exists():
        words = [str(ROOT / words[0]), *words[1:]]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, text=True, check=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout


def rewrite(name: str, folder: Path) -> None:
    """Run the commands of a page in a folder, and write its outputs and figures again."""
    path = ROOT / f"docs/{name}.md"
    page = path.read_text()
    write_files(folder, files_of(name))
    for block, output in shown(page).items():
        said = "".join(started(words, folder) for words in programs(block))
        page = page.replace(output, renewed(output, said)) if output else page
    path.write_text(page)
    picture = ROOT / "docs/domains.svg"
    picture.write_text(redrawn(picture.read_text(), accuracies_of_one((ROOT / "docs/start.md").read_text())))
    for figure, pattern in FIGURES.items():
        for found in folder.glob(pattern) if figure.startswith(name) else ():
            shutil.copy(found, ROOT / "docs" / figure)


def accuracies_of_one(page: str) -> list[float]:
    """The accuracy on each domain of the network that one client trained, by docs/start.md."""
    row = re.search(r"^\| one .*$", page, flags=re.M)[0]
    return [float(cell) for cell in re.findall(r"([\d.]+) ±", row)[2:]]


def redrawn(picture: str, accuracies: list[float]) -> str:
    """docs/domains.svg with these accuracies: the bars, and the numbers below them."""
    bars, numbers = iter(accuracies), iter(accuracies)
    picture = re.sub(r'(class="bar"[^>]* width=")[\d.]+', lambda m: f"{m[1]}{0.84 * next(bars):.1f}", picture)
    return re.sub(r">\d+%<", lambda _: f">{next(numbers):.0f}%<", picture)


def main() -> None:
    argparse.ArgumentParser(prog="python -m tests.page_outputs", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name in ("start", "own"):
        with tempfile.TemporaryDirectory() as folder:
            rewrite(name, Path(folder))


if __name__ == "__main__":
    main()
