"""`python -m parallel3d.tools.plan`."""

import sys

from parallel3d.tools.plan.command import main

sys.exit(main())
