"""`python -m parallel3d.tools.report`."""

import sys

from parallel3d.tools.report.command import main

if __name__ == "__main__":
    sys.exit(main())
