"""The pages that are rendered, and their sentences, as templates: reproduce/templates/."""

from __future__ import annotations

from reproduce.methods import ROOT

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Environment(undefined=StrictUndefined, keep_trailing_newline=True, extensions=["jinja2.ext.do"],
                        loader=FileSystemLoader(ROOT / "reproduce" / "templates"))


def in_words(what: str, answer) -> str:
    """A sentence of words.jinja: `notes` on answer A, answer B (`others`), or what holds of a `paper`
    by its first claim."""
    return str(getattr(TEMPLATES.get_template("words.jinja").module, what)(answer))
