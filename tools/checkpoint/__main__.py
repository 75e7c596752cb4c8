"""`python -m parallel3d.tools.checkpoint`."""

import sys

from parallel3d.tools.checkpoint.command import main

sys.exit(main())
