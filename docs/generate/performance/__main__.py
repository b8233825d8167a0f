"""`python -m performance [NAME …]`: run benchmarks, all by default, and write their sections of docs/performance.md.

A name is that of a script, or of one of its parts: `planner`, `"planner speed"`."""

import sys

from performance import PAGE, merged, run, scripts

failed = []
known = scripts()
chosen = [found for name in sys.argv[1:] for found in known if found == name or found.split()[0] == name]
if unknown := [name for name in sys.argv[1:] if not any(name in (found, found.split()[0]) for found in known)]:
    sys.exit(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(known)}")
for name in chosen or known:
    code, text = run(name)
    if code:  # the page keeps the section of the last run that ended well
        failed.append(name)
    else:
        PAGE.write_text(merged(PAGE.read_text("utf-8"), {name: text}), "utf-8")
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
