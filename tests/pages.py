"""What the tests of the pages of docs/build.py share: a page that is read, and one in a browser."""

from html.parser import HTMLParser
from pathlib import Path


class Read(HTMLParser):
    """Of a page, or a part of one, its ids, its links and what it loads, its scripts and formulas."""

    def __init__(self, page: Path | str):
        super().__init__()
        self.ids, self.links, self.loads = [], [], []
        self.scripts = self.formulas = 0
        self.feed(page.read_text() if isinstance(page, Path) else page)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag != "a":
            self.loads += [found[name] for name in ("src", "href") if name in found]
        self.scripts += tag == "script"
        self.formulas += tag == "math"


class Opened:
    """A page in the browser, and what it complained of."""

    def __init__(self, browser, site: Path, page: str, width: int = 1400, **how):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **how)
        self.tab = self.context.new_page()
        self.complaints = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.address = f"file://{site / page}"
        self.tab.goto(self.address)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()
