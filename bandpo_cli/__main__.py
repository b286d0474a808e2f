"""`bandpo` and `python -m bandpo_cli`: run the command line, print a user's mistake as one line, exit code 2."""

from __future__ import annotations

import sys

from bandpo_cli.cli import app
from bandpo_cli.errors import UserError


def main() -> None:
    """Run the command line."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
