"""The commands that the documentation and the docstrings of the programs show, read from the files."""

import ast
import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.machinery.test_architecture import tracked

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/*.md", "papers/*.md", "papers/*/*.md", "results/README.md",
             "papers/README.md", "deploy/README.md"]
PROGRAMS = ("python", "python3", "pip", "ruff", "bash", "diff")  # with which a command begins
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command and where it stands."""

    where: str  # the file
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def all_commands() -> list[Command]:
    """Each command of the documents and of the docstrings, in their order; the same one of several files
    once."""
    found = {}
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            for words in commands_of_markdown(path.read_text()):
                found.setdefault(words, str(path.relative_to(ROOT)))
    for path in programs():
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for words in commands_of_docstring(docstring):
            found.setdefault(words, str(path.relative_to(ROOT)))
    return [Command(where, words) for words, where in found.items()]


def programs() -> list[Path]:
    """The Python files of the repository."""
    return [ROOT / name for name in tracked() if name.endswith(".py")]


def commands_of_markdown(text: str) -> list[tuple[str, ...]]:
    """The commands in fenced blocks without a language, and those in backticks."""
    commands = []
    for language, block in FENCED.findall(text):
        if language in ("", "bash", "sh"):
            for line in block.splitlines():
                commands += commands_of_line(line)
    return commands + commands_in_backticks(FENCED.sub("", text))


def commands_of_docstring(text: str) -> list[tuple[str, ...]]:
    """The commands in lines of their own, four columns in, and those in backticks."""
    commands = []
    for line in text.splitlines():
        if line.startswith("    "):
            commands += commands_of_line(line)
    return commands + commands_in_backticks(text)


def commands_in_backticks(text: str) -> list[tuple[str, ...]]:
    commands = []
    for quoted in re.findall(r"`([^`]+)`", text):
        commands += commands_of_line(" ".join(quoted.split()))
    return commands


def commands_of_line(line: str) -> list[tuple[str, ...]]:
    """The commands of a line, without what is said of them behind #; none if it is no command."""
    commands = []
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a sentence with an apostrophe
        return []
    for is_and, part in itertools.groupby(words, key=lambda word: word == "&&"):
        command = without_environment(tuple(part))
        if is_and or not command or Path(command[0]).name not in PROGRAMS:
            continue
        if len(command) > 1:
            commands.append((Path(command[0]).name, *command[1:]))
    return commands


def without_environment(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words behind settings such as KILLS=5."""
    return tuple(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=\S*", word), words))
