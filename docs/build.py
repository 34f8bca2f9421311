"""Static pages that show each method beside its code: `python docs/build.py`, then open site/index.html.

    pip install -r requirements-docs.txt
    python docs/build.py

A method's page has its note and each equation beside the statements that compute it; the file has its own.
The results are the pages of results/, as Markdown. Four equations can be played with (docs/interactive.js).
A test stands with its code at the end of a method's page; it is a link too if pyproject.toml has the
repository's address ([project.urls], Repository). A link that leads nowhere ends the build. The pages need no
server, fetch nothing from elsewhere and read without a script. The HTML is in docs/templates/.

The tables of the equations in papers/*/differences.md are written anew too, from papers/*/equations.toml.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `python docs/build.py` has docs/ there

from docs.equations import METHODS  # noqa: E402
from docs.methods_pages import build, with_table  # noqa: E402
from docs.pages import note_of  # noqa: E402
from plumbing.run.errors import one_line_on_failure  # noqa: E402
from plumbing.run.files import output_folder, write_text  # noqa: E402
from plumbing.run.settings import Parser  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="docs/build.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the pages")
    args = parser.parse_args(argv)
    with one_line_on_failure("docs/build.py", "the pages are written"):
        output_folder(args.out, "index.html", "CleanFDG")
        for method in METHODS:
            write_text(ROOT / note_of(method), with_table(method))
        build(args.out)
    print(f"open {args.out / 'index.html'}")


if __name__ == "__main__":
    main()
