"""Links to code in docs/architecture.md: the file of each link defines the name beside it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[`(\S+)` (\w+)\]\(\.\./bandpo_cli/(\S+)\)")


def test_the_files_of_links_define_their_names():
    links = LINK.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert len(links) >= 20
    for file, name, linked_file in links:
        text = (ROOT / "bandpo_cli" / file).read_text(encoding="utf-8")
        assert file == linked_file
        assert re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), f"{file} does not define {name}"
