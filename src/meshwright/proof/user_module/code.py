"""Functions of the user that new processes call: each is sent as the place where it is defined, and imported there again.

    "script.py:make", "package.models:make"     text, as on the command line
    make, MyModule, partial(make, width=64)      functions and classes at the top level of a file
    nn.CrossEntropyLoss(), tensors, numbers      values, sent as they are

A lambda, a function inside a function, and whatever was typed into an interactive session exist in one process only: they are refused before any
rank starts. What goes wrong in the user's code is an error in one sentence with the file and the line, not a traceback.
"""

import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from meshwright.errors import MeshwrightError, nearest

PLACE = re.compile(r"(?P<source>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
PACKAGES = (str(Path(__file__).parents[2]), str(Path(traceback.__file__).parent))  # ours and Python's


@dataclass(frozen=True)
class Named:
    """A value by its place: a file or a module, and a name in it; with `args` and `kwargs` it is a partial of that function."""

    source: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    optional: bool = False  # a file that does not define the name means None

    def __str__(self) -> str:
        return f"{self.name} of {Path(self.source).name}"


def is_place(text: object) -> bool:
    """Whether a text names a function of a file or of a module, as "script.py:make" does."""
    return isinstance(text, str) and PLACE.fullmatch(text) is not None


def named(text: str) -> Named:
    match = PLACE.fullmatch(text)
    if match is None:
        raise MeshwrightError(
            "MW-VERIFY-002",
            f"'{text}' does not name a function",
            why="A function is named by its file or module and its name",
            fix=f"{text}:make" if text.endswith(".py") else "script.py:make",
        )
    source, name = match["source"], match["name"]
    if not source.endswith(".py"):
        return Named(source, name)
    if not Path(source).is_file():
        raise MeshwrightError("MW-VERIFY-002", f"there is no file '{source}'")
    return Named(str(Path(source).resolve()), name)


def sendable(value: Any, argument: str) -> Any:
    """The value in a form that another process can read, or an error that names the argument."""
    if isinstance(value, partial):
        inner = sendable(value.func, argument)
        if isinstance(inner, Named) and not inner.args and not inner.kwargs:
            words = {key: sendable(word, argument) for key, word in value.keywords.items()}
            return Named(inner.source, inner.name, tuple(sendable(a, argument) for a in value.args), words)
    if isinstance(value, FunctionType | type):
        return Named(source_of(value, argument), value.__qualname__)
    if is_place(value):
        return named(value)
    try:
        sent = bytes(ForkingPickler.dumps(value))
    except Exception as error:
        raise not_sendable(argument, f"{type(error).__name__}: {first_line(error)}") from None
    if b"__main__" in sent:
        raise not_sendable(argument, f"{type(value).__name__} is defined in the script that is running")
    return value


def source_of(function: FunctionType | type, argument: str) -> str:
    """The module of a function, or the file of the running script."""
    if "<lambda>" in function.__qualname__ or "<locals>" in function.__qualname__:
        kind = "a lambda" if "<lambda>" in function.__qualname__ else "defined inside another function"
        raise not_sendable(argument, f"{function.__qualname__} is {kind}")
    if function.__module__ != "__main__":
        return function.__module__
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        raise not_sendable(argument, f"{function.__qualname__} is defined in an interactive session")
    return str(Path(file).resolve())


def not_sendable(argument: str, what: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-VERIFY-003",
        f"{argument}= cannot be sent to another process: {what}",
        why="Ranks are new processes, which import what they call",
        fix=f'define it at the top level of a file, then {argument}="script.py:name" or the function itself',
    )


def load(value: Any) -> Any:
    """In a rank: the value that was sent."""
    if not isinstance(value, Named):
        return value
    target: Any = module_of(value.source)
    for part in value.name.split("."):
        if not hasattr(target, part):
            if value.optional:
                return None
            raise missing(value, target)
        target = getattr(target, part)
    args, kwargs = [load(a) for a in value.args], {key: load(word) for key, word in value.kwargs.items()}
    return partial(target, *args, **kwargs) if args or kwargs else target


def missing(value: Named, target: Any) -> MeshwrightError:
    names = sorted(name for name, member in vars(target).items() if callable(member) and not name.startswith("_"))
    near = nearest(value.name, names)
    return MeshwrightError(
        "MW-VERIFY-002",
        f"'{Path(value.source).name}' has no '{value.name}'",
        valid=names,
        fix=f"{Path(value.source).name}:{near}" if near else "",
    )


def module_of(source: str) -> ModuleType:
    """The module at a name or in a file. A file is imported under its own name, so that its `__main__` block does not run."""
    sys.dont_write_bytecode = True
    with one_sentence(f"'{Path(source).name if source.endswith('.py') else source}'", "MW-VERIFY-002"):
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source)
        name = f"meshwright_user_{path.stem}"
        if name not in sys.modules:
            sys.path.insert(0, str(path.parent))
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]


@contextlib.contextmanager
def one_sentence(what: str, code: str, why: str = "", fix: str = "") -> Iterator[None]:
    """Turn what the user's code raises into an error with the line that raised it; our own errors pass."""
    try:
        yield
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        at = place_of(error)
        message = f"{what} raises {type(error).__name__}: {first_line(error)}" + (f" ({at})" if at else "")
        raise MeshwrightError(code, message, why=why, fix=fix) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of a syntax error the message alone."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:300]


def place_of(error: BaseException) -> str:
    """The file and line of the user's code that raised: the innermost frame outside of torch, Python and Meshwright."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in ("site-packages", "<frozen", *PACKAGES))]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
