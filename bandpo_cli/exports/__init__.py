"""Experiments for other engines: the files with which verl runs the experiment of a configuration."""
