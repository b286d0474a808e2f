"""Elements of an HTML page, for the tests of reports and of `bandpo view`."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Names, links and text of the elements, scripts by id, comments, title, and the text of each class `tokens`.

    No element may have an event handler.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.names, self.sources, self.comments, self.tokens, self._path = [], [], [], [], []
        self.scripts: dict[str | None, str] = {}
        self.text = self.title = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.names.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self._path.append((tag, dict(attrs)))
        if self._path[-1][1].get("class") == "tokens":
            self.tokens.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._path and self._path.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, attributes = self._path[-1] if self._path else ("", {})
        self.text += data
        if tag == "script":
            self.scripts[attributes.get("id")] = data
        elif tag == "title":
            self.title += data
        elif any(of.get("class") == "tokens" for _, of in self._path):
            self.tokens[-1] += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)
