"""A report, written and read."""

import json
from html.parser import HTMLParser

import pytest

from lpes_eval import cli


class Page(HTMLParser):
    """What a browser finds in a page: its elements, its visible text, its data."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.data, self._in = [], "", "", ""
        self.feed(html)
        self.data = json.loads(self.data)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._in = tag if tag != "script" else str(dict(attributes).get("id"))

    def handle_data(self, text):
        if self._in == "data":
            self.data += text
        elif self._in not in ("style", "None"):
            self.text += text

    def handle_endtag(self, tag):
        self._in = ""


@pytest.fixture
def report(tmp_path):
    def write(*paths, options=()):
        target = tmp_path / "report.html"
        assert cli.main(["report", *map(str, paths), "-o", str(target), *map(str, options)]) == 0
        return Page(target.read_text(encoding="utf-8"))

    return write
