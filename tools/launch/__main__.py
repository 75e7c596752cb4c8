"""`python -m parallel3d.tools.launch`."""

import sys

from parallel3d.tools.launch.command import main

sys.exit(main())
