"""`python -m thalweg` is the command `thalweg`."""

import sys

from thalweg.cli import main

sys.exit(main())
