"""The check as an installed package, `check_training`, with the command `check-training`.

Its code is in a folder `check` of this one, and keeps that name: only a process of the check itself
finds it there, so nothing called check is in anybody's site-packages.
"""

import sys
from pathlib import Path


def main():
    """Run the check. Exits with its code."""
    sys.path.insert(0, str(Path(__file__).parent))
    from check.__main__ import main

    sys.exit(main())
