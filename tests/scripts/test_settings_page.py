"""docs/settings.md has every setting as the classes define it."""

from bandpo_cli.config.layers import flatten, resolve
from scripts.settings_page import PAGE, page


def test_the_page_is_up_to_date_and_has_every_setting_with_a_description():
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, "python -m scripts.settings_page writes the page"
    tables = [line for line in text.splitlines() if line.startswith("| `")]
    assert all(line.split(" | ")[1].strip() and line.rpartition(" | ")[2][:-2].strip() for line in tables)
    layers = {"model": {"lora": {"rank": 8}}}, {"bounds": {"method": "clip-cov"}}, {"task": {"name": "gsm8k"}}
    for layer in ({}, *layers):
        for key in flatten(resolve([layer]).model_dump(), keep_empty=True):
            assert f"\n| `{key}` |" in text or key in ("task.name", "bounds.method"), key
