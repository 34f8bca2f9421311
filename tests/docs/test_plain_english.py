"""No sentence of the documents is long. Tables, code, headings and quotations are not counted."""

import re
import tomllib

from docs.equations import KINDS, METHODS
from tests.conftest import ROOT

import pytest

MOST = 40  # words
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("start", "exercises", "methods",
                                                                            "errata", "runs")),
         *(f"papers/{method}/equations.toml" for method in METHODS),
         *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "papers").glob("*/*.md"))]
ABBREVIATED = re.compile(r"\b(Eqs?|Secs?|Apps?|Algs?|Figs?|al)\. ")


def sentences(text: str) -> list[str]:
    """Those of a page. An item of a list is a paragraph of its own; a link is its words, code is one word."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|<[^>]*>|!\[[^]]*\]\([^)]*\)", "", text, flags=re.M | re.S)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    text = re.sub(r"^ *([-*]|\d+\.) ", "\n", text, flags=re.M)
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^[|#>].*$", "\n", text, flags=re.M))
    found = []
    for paragraph in paragraphs:
        words = ABBREVIATED.sub(r"\1 ", " ".join(paragraph.split()))
        found += re.split(r"(?<=[.!?])[)*]* ", words)
    return found


def count(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def prose(path: str) -> str:
    """A page, or what a table of equations says."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    read = tomllib.loads(text)
    entries = [read, *read["entry"], *read.get("part", []), *read.get("unused", [])]
    words = [entry.get(key, "") for entry in entries for key in ("says", "why", *KINDS)]
    return "\n\n".join(words)


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_long(page):
    assert [words for words in sentences(prose(page)) if count(words) > MOST] == []
