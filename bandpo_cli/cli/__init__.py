"""Command line: a file per command with its flags, help and output; options of several commands; the console."""
