"""`python -m parallel3d.tools.check_layout`."""

import sys

from parallel3d.tools.check_layout.command import main

sys.exit(main())
