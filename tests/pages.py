"""What the tests of the pages of docs/build.py share: the words of a page, and one in a browser. Without the
libraries that make pages they are skipped."""

import re
from contextlib import contextmanager
from html import unescape
from pathlib import Path

import pytest

for library in ("markdown_it", "pygments", "math_core"):
    pytest.importorskip(library, reason="needs `pip install -r requirements-docs.txt`")


def words_of(html: str) -> str:
    """What a reader sees, in one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


@contextmanager
def opened(browser, site: Path, page: str, width: int = 1400, **how):
    """A page in a tab of the browser, and the list of what it complains of."""
    context, complaints = browser.new_context(viewport={"width": width, "height": 900}, **how), []
    tab = context.new_page()
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("requestfailed", lambda request: complaints.append(request.url))
    tab.goto(f"file://{site / page}")
    yield tab, complaints
    context.close()
