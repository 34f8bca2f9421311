"""The pages that are rendered, and their sentences, as templates: reproduce/templates/."""

from __future__ import annotations

from reproduce.methods import ROOT

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Environment(undefined=StrictUndefined, keep_trailing_newline=True, extensions=["jinja2.ext.do"],
                        loader=FileSystemLoader(ROOT / "reproduce" / "templates"))
