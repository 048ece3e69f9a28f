"""Text that came from a file stays text: against a Markdown renderer and an XML parser."""

import html as entities
import re

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lpes_eval.text import markdown, terminal

RENDER = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render
FRAMES = ("{}", "* {}", "### {}", "| a | b |\n| - | - |\n| x | {} |", "before\n{}")
ALPHABET = "ab1 *_~`[]()!<>&|\\#+-=.:/@$\n\t\x1b\ud800\u2028é🦊"


@given(st.text(alphabet=ALPHABET, max_size=30))
def test_markdown_shows_any_text_as_it_is(text: str) -> None:
    for frame in FRAMES:
        rendered = RENDER(frame.format(markdown(text)))
        shown = entities.unescape(re.sub("<[^>]*>", "", rendered))
        assert terminal(text).strip() in shown
        assert not re.search("<(?!!-- -->|/?(p|ul|li|h3|table|thead|tbody|tr|th|td)\\b)", rendered)


def test_github_makes_no_links_of_names() -> None:
    assert markdown("a@b.cd www.x.yz http://z") == r"a<!-- -->@b.cd www\.x.yz http\://z"


@given(st.text(max_size=30))
def test_a_terminal_gets_one_line_that_can_be_encoded(text: str) -> None:
    assert terminal(text).encode().decode().isprintable() or not text.isprintable()
    assert len(terminal(text).splitlines()) <= 1
    assert not re.search("[\x00-\x1f\x7f-\x9f]", terminal(text))
