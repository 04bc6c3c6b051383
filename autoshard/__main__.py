"""`python -m autoshard` is the `autoshard` command."""

from __future__ import annotations

import sys

from autoshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
