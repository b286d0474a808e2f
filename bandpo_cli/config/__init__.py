"""Settings: one class per section, validated without torch and numpy, and the layers that they are merged from."""
