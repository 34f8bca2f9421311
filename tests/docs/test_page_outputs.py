"""The outputs of docs/start.md and docs/own.md are what the commands above them print."""

from tests.conftest import ROOT
from tests.page_outputs import files_of, programs, renewed, shown, started

import pytest

SHOWN = [(name, block, output) for name in ("start", "own")
         for block, output in shown((ROOT / f"docs/{name}.md").read_text()).items()]


@pytest.mark.slow
@pytest.mark.parametrize("name, block, output", SHOWN)
def test_the_commands_of_the_page_print_them(tmp_path, name, block, output):
    for file, text in files_of(name).items():
        (tmp_path / file).write_text(text)
    renewed(output, "".join(started(words, tmp_path) for words in programs(block)))
