"""Static pages that show each method beside its code: `python docs/build.py`, then open site/index.html.

    pip install -r requirements-docs.txt
    python docs/build.py                  # writes the notes (docs/notes.py) and the pages
    python docs/build.py --notes          # the notes alone

A method's page has its note, then each equation beside the lines that compute it, then the whole file. The
results have docs/results.py. What pages link to, such as tests, comes along. There is no script, and nothing
is fetched from anywhere. The HTML is in docs/templates/.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `python docs/build.py` has docs/ there

from docs import notes  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the pages")
    parser.add_argument("--notes", action="store_true", help="write the notes alone")
    args = parser.parse_args(argv)
    for path, text in notes.written().items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    if not args.notes:
        from docs.methods_pages import build  # it needs requirements-docs.txt, which the notes do without
        build(args.out)
        print(f"open {args.out / 'index.html'}")


if __name__ == "__main__":
    main()
