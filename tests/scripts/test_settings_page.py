"""docs/settings.md has every setting as the classes define it."""

from bandpo_cli.config.layers import flatten, resolve
from scripts.settings_page import PAGE, page


def test_the_page_is_up_to_date_and_has_every_setting_with_a_description():
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, "python -m scripts.settings_page writes the page"
    tables = [line for line in text.splitlines() if line.startswith("| `")]
    assert all(
        cell.strip() for line in tables for cell in (line.split(" | ")[1], line.rpartition(" | ")[2][:-2])
    )
    for layer in (
        {},
        {"model": {"lora": {"rank": 8}}},
        {"bounds": {"method": "clip-cov"}},
        {"task": {"name": "gsm8k"}},
    ):
        for key in flatten(resolve([layer]).model_dump(), keep_empty=True):
            assert f"\n| `{key}` |" in text or key in ("task.name", "bounds.method"), key
