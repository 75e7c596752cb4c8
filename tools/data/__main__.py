"""`python -m parallel3d.tools.data`."""

import sys

from parallel3d.tools.data.command import main

if __name__ == "__main__":  # Worker processes import this module again.
    sys.exit(main())
