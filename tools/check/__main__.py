"""The command `python CLONE/check` by its old name, which hooks and workflows of users have."""

import sys
from pathlib import Path

if __package__ in (None, ""):  # started by its path, from the folder of the script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from check.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
