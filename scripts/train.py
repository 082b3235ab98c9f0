"""Train a task on a backend: the same as `tfdist train`. See `python scripts/train.py --help`."""

import sys

from tfdist.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
