"""`python -m readme [--all]`: write the outputs into README.md; `--all` also those of `verify` and `train`."""

import os
import sys

from readme import README, rewritten

os.chdir(README.parent)
README.write_text(rewritten(README.read_text("utf-8"), repeatable_only="--all" not in sys.argv), "utf-8")
