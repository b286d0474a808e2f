"""Measurements, each a program: `python benchmarks/NAME.py --help`. pyarrow 17 installs a package of this name too."""
