"""The data in a pickle, read without running it: the one file of Meshwright that reads pickles, and it does not import `pickle`.

A pickle is a program for a small stack machine. Two of its instructions are dangerous: GLOBAL imports any name, and REDUCE calls it.
This interpreter executes a subset of the instructions on plain data. A global becomes a `Symbol`, which is only a pair of names and
must be in a list of allowed ones; a call and an object become an `Instance`, which records its symbol, arguments and state. So there is
nothing that a hostile file could call. `pickletools` of the standard library splits the bytes into instructions; it executes nothing.

Everything is bounded by the size of the file: the memo is a dictionary, so that an index of 2³² costs one entry, and keys of
dictionaries are texts, numbers or instances, whose hash does not descend into what they contain.
"""

import pickletools
import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class Symbol(NamedTuple):
    """The name of a class or function; it is never imported."""

    module: str
    name: str


class Instance:
    """An object or a call in a pickle: what it is made from, and the state it was given."""

    __slots__ = ("arguments", "state", "symbol")

    def __init__(self, symbol: Symbol, arguments: tuple[Any, ...]) -> None:
        self.symbol, self.arguments = symbol, arguments
        self.state: Any = None

    def field(self, name: str) -> Any:
        """A field of an object whose state is a table."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"{self.symbol.name} has no field {name}")
        return self.state[name]


class _Mark:
    """Marks the start of the items of a list, tuple or dictionary on the stack."""


MARK = _Mark()
VALUES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": lambda: (),
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": list, "MARK": lambda: MARK,
}  # fmt: skip
LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINSTRING", "BINSTRING",
}  # fmt: skip
FIXED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
NO_EFFECT = {"PROTO", "FRAME"}


class UnreadPickle(ValueError):
    """The data is not a pickle of plain data and allowed names; the text says why."""


def parse(data: bytes, allowed: Collection[Symbol] = (), persistent: Callable[[Any], Any] | None = None) -> Any:
    """The data of a pickle. `allowed` are the names that may occur; `persistent` translates references to data outside of it.

    Raises `UnreadPickle`, or what `persistent` raises."""
    try:
        return _Machine(data, allowed, persistent).run()
    except (ValueError, TypeError, LookupError, OverflowError, MemoryError, struct.error) as error:
        raise UnreadPickle(f"{type(error).__name__}: {str(error)[:200]}") from None


class _Machine:
    def __init__(self, data: bytes, allowed: Collection[Symbol], persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.allowed, self.persistent = data, allowed, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self.data):
            if opcode.name == "STOP":
                (result,) = self.stack
                return result
            self.step(opcode.name, argument)
        raise ValueError("it ends early")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in LITERALS:
            stack.append(argument)
        elif name in VALUES:
            stack.append(VALUES[name]())
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name in FIXED_TUPLES:
            count = FIXED_TUPLES[name]
            if len(stack) < count:
                raise ValueError("a tuple has too few items")
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [stack.pop()] if name == "APPEND" else self.since_mark()
            self.top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            self.set_items([stack.pop(-2), stack.pop()] if name == "SETITEM" else self.since_mark())
        elif name == "GLOBAL":
            stack.append(self.symbol(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self.symbol(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, symbol = stack.pop(), stack.pop()
            if not isinstance(symbol, Symbol) or type(arguments) is not tuple:
                raise ValueError("a call of something that is not a name")
            stack.append(Instance(symbol, arguments))
        elif name == "BUILD":
            state = stack.pop()
            self.top(Instance).state = state
        elif name == "BINPERSID" and self.persistent is not None:
            stack.append(self.persistent(stack.pop()))
        elif name not in NO_EFFECT:
            raise ValueError(f"the instruction {name} is not allowed")

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"expected {kind.__name__}")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise ValueError("a list has no beginning")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Instance):  # an OrderedDict: its content is not used
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items of something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | Instance):
                raise ValueError("a key is not a text, a number or an object")
            target[key] = value

    def symbol(self, module: Any, name: Any) -> Symbol:
        found = Symbol(module, name)
        if not isinstance(module, str) or not isinstance(name, str) or found not in self.allowed:
            raise ValueError(f"it names {str(module)[:60]}.{str(name)[:60]}, which is not allowed")
        return found
