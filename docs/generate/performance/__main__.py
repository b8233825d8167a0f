"""`python -m performance [NAME …]`: run benchmarks, all by default, and write their sections of docs/performance.md."""

import sys

from performance import PAGE, merged, run, scripts

failed = []
for name in sys.argv[1:] or scripts():
    code, text = run(name)
    if code:  # the page keeps the section of the last run that ended well
        failed.append(name)
    else:
        PAGE.write_text(merged(PAGE.read_text("utf-8"), {name: text}), "utf-8")
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
