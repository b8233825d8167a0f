"""`python -m reference`: write docs/reference/."""

from reference import FOLDER, PAGES

FOLDER.mkdir(exist_ok=True)
for name, write in PAGES.items():
    (FOLDER / name).write_text(write(), "utf-8")
