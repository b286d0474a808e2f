"""Build what each process that loads a model needs, once in the process that `tests.commands` forks from."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen2")  # compiles 900 regular expressions, in half a second
