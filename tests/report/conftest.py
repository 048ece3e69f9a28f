"""A report, written and read."""

from html.parser import HTMLParser

import pytest

from lpes_eval import cli


class Page(HTMLParser):
    """What a browser finds in a page: its elements, its visible text, and the cells of each row of its tables."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.rows, self._in = [], "", [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._in = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, text):
        if self._in != "style":
            self.text += text
        if self._in in ("td", "th"):
            self.rows[-1][-1] += text

    def handle_endtag(self, tag):
        self._in = ""


@pytest.fixture
def report(tmp_path):
    def write(*paths, options=()):
        target = tmp_path / "report.html"
        assert cli.main(["report", *map(str, paths), "-o", str(target), *map(str, options)]) == 0
        return Page(target.read_text(encoding="utf-8"))

    return write
