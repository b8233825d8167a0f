"""`python -m blocks [--slow]`: write the outputs of console blocks into README.md and the pages; `--slow` also those that train."""

import os
import sys

from blocks import MISSES, ROOT, misses, pages, rewritten

os.chdir(ROOT)
for page in pages():
    text = page.read_text("utf-8")
    fresh = MISSES.sub(lambda m: misses(), rewritten(text, slow="--slow" in sys.argv))
    if fresh != text:
        page.write_text(fresh, "utf-8")
        print(page.relative_to(ROOT))
