"""Results and site as a machine with a GPU and bf16 instructions renders them, for test_any_machine.py. What
asks for a GPU ends with an error where there is none. Without the libraries
that make pages, the results alone."""

import sys
from importlib.util import find_spec
from pathlib import Path

import reproduce_tables
from plumbing.run.files import write_text

import torch


def main(out: Path) -> None:
    torch.cpu._is_avx512_bf16_supported = lambda: True
    torch.cuda.is_available = lambda: True
    print("mean ± deviation")  # as --only prints a table
    try:
        reproduce_tables.main(["--out", str(out / "results")])
    except SystemExit as end:
        if end.code:
            raise
    if find_spec("markdown_it"):
        from docs import methods_pages
        from docs.equations import METHODS
        from docs.pages import note_of
        methods_pages.build(out / "site")
        for method in METHODS:
            write_text(out / note_of(method), methods_pages.with_table(method))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
