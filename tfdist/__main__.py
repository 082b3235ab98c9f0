"""`python -m tfdist`."""

import sys

from tfdist.cli import main

sys.exit(main())
