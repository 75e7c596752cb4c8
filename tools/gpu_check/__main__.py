"""`python -m parallel3d.tools.gpu_check`."""

import sys

from parallel3d.tools.gpu_check.command import main

sys.exit(main())
