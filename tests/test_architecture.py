"""Links to lines of the package in docs/architecture.md: each line defines the name of its link."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[`(\S+):(\d+)` (\w+)\]\(\.\./bandpo_cli/(\S+)#L(\d+)\)")


def test_links_to_lines_are_right() -> None:
    links = LINK.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert len({file for file, *_ in links}) == 21
    for file, line, name, linked_file, linked_line in links:
        lines = (ROOT / "bandpo_cli" / file).read_text(encoding="utf-8").splitlines()
        numbers = [i for i, text in enumerate(lines, 1) if re.match(rf"\s*(def|class) {name}\b", text)]
        assert (file, line) == (linked_file, linked_line)
        assert int(line) in numbers, f"{file}: {name} is in line {numbers}"
