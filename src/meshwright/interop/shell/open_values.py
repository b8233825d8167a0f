"""Values that only running a script would give: marked in a text, and kept there as the script writes them."""

import re

OPEN, CLOSE = "\x01", "\x02"  # around the source of an open value
OPEN_VALUE = re.compile(f"{OPEN}[^{CLOSE}]*{CLOSE}")


def open_value(source: str) -> str:
    """A value that only running the script would give, as it is written."""
    return f"{OPEN}{source.replace(OPEN, '').replace(CLOSE, '')}{CLOSE}"


def as_written(word: str) -> str:
    """A word with its open values as the script writes them."""
    return OPEN_VALUE.sub(lambda found: found[0][1:-1], word)


def closed(text: str) -> str:
    """A text without its open values, which are empty in an empty environment."""
    return OPEN_VALUE.sub("", text)


def split_open(text: str) -> list[str]:
    """The words of a text; the spaces inside an open value split nothing."""
    return re.findall(f"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^\\s])+", text)
