"""Lines of code by room: no blank lines, comments or docstrings, and no tables of data.

A line counts if it holds a token that is neither a comment nor part of a docstring. Lines inside a literal of constants only (a table) do
not count, except its first one: moving code into data, or data into code, does not change what there is to read.

    python benchmarks/count_code.py [FOLDER]        default: src/meshwright
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DATA = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Constant, ast.Load, ast.UnaryOp, ast.USub)


def code_lines(text: str) -> int:
    """Lines of one file that hold code."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.Dict() | ast.List() | ast.Tuple() | ast.Set() if all(isinstance(n, DATA) for n in ast.walk(node)):
                lines -= set(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return len(lines)


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src" / "meshwright"
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        room = path.relative_to(root).parts[0].removesuffix(".py")
        rooms[room] += code_lines(path.read_text("utf-8"))
        files[room] += 1
    for room, count in rooms.most_common():
        print(f"{room:<12}{count:>8,} lines in {files[room]} files")
    print(f"{'all':<12}{rooms.total():>8,} lines in {files.total()} files")


if __name__ == "__main__":
    main()
