"""Whether a page's tags are closed in order, and what stands in it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "input", "line", "rect", "polygon", "polyline", "circle"}


class Tags(HTMLParser):
    """After `feed`: `seen` are (tag, attributes), `texts` what stands between tags, `open` the tags that nobody has closed."""

    def __init__(self, text=""):
        super().__init__()
        self.open, self.seen, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def words(self):
        """All text."""
        return " ".join(self.texts)
