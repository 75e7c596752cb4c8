"""`python -m parallel3d.tools.bench`."""

import sys

from parallel3d.tools.bench.command import main

sys.exit(main())
