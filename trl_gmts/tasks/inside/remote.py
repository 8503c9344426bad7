"""The answer in one process, its tests in another: what the tests call `solution` is a stand-in for the real thing.

A process that runs both can be talked into any verdict by the answer: leave early, replace `assertEqual`, return an object
equal to everything. So the tests run where no code of the answer ever does, and only plain data comes back: numbers,
strings, containers and the like by value, rebuilt from a list of allowed types, and everything else as a `Remote`, whose
methods run over there. A `Remote` is equal to plain data only if it is that data (a named tuple, an enumerated integer).

What does not work across the gap, and fails the test: mocks and captured output of the answer, test-defined classes
handed to it, coroutines, identity (`is`) of objects.
"""

import builtins
import io
import operator
import pickle
import struct
import types
from collections.abc import Callable
from typing import Any, BinaryIO


LARGEST_MESSAGE = 64 << 20

# Types that cross by value, as (module, name).
BUILTIN_TYPES = "bool int float complex str bytes bytearray list tuple dict set frozenset range slice"
PLAIN_TYPES = {
    *(("builtins", name) for name in BUILTIN_TYPES.split()),
    *(("datetime", name) for name in "date time datetime timedelta timezone".split()),
    *(("collections", name) for name in "OrderedDict defaultdict deque Counter".split()),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
# Functions that rebuild them.
BUILDERS = {
    *(("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")),
    *(("numpy.core.multiarray", name) for name in ("_reconstruct", "scalar")),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.numeric", "_frombuffer"),
}
# Subclasses of these come with the plain value that comparisons with plain data see.
BASES = (int, float, str, bytes, tuple, list, dict, set, frozenset)


TEST_MODULES = ("tests", "test_answer")
"""Modules whose functions only the tests' process has."""


class AnswerGone(Exception):
    """The answer's process ended, or sent something that is not a message."""


class Channel:
    """Messages over two pipes. Each side asks, and serves what the other asks while it waits for its own result."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO):
        self.reader, self.writer = reader, writer
        self.objects: list[Any] = []
        self.broken = False

    def serve(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        raise NotImplementedError

    def dump(self, message: Any) -> bytes:
        raise NotImplementedError

    def load(self, data: bytes) -> Any:
        raise NotImplementedError

    def keep(self, obj: Any) -> int:
        """Number an object, so that the other side can refer to it. Kept until the process ends, which is soon."""
        self.objects.append(obj)
        return len(self.objects) - 1

    def send(self, message: Any) -> None:
        data = self.dump(message)
        if len(data) > LARGEST_MESSAGE:
            raise ValueError(f"a value of {len(data)} bytes is too large to hand over")
        self.writer.write(struct.pack("<I", len(data)) + data)
        self.writer.flush()

    def receive(self) -> Any:
        header = self.reader.read(4)
        if len(header) < 4:
            raise AnswerGone("the answer's process has ended")
        (length,) = struct.unpack("<I", header)
        data = self.reader.read(length) if length <= LARGEST_MESSAGE else b""
        if len(data) < length or length > LARGEST_MESSAGE:
            raise AnswerGone("the answer's process sent half a message")
        return self.load(data)

    def ask(self, *request: Any) -> tuple[Any, ...]:
        """Send a request and return its reply, serving requests until it comes."""
        self.send(("ask", *request))
        while True:
            kind, *rest = self.receive()
            if kind == "reply":
                return tuple(rest)
            self.reply(tuple(rest))

    def reply(self, request: tuple[Any, ...]) -> None:
        try:
            message = ("reply", *self.serve(request))
            self.send(message)
        except AnswerGone:
            raise
        except BaseException as error:  # the other side decides what an error means
            self.send(("reply", "raised", lineage(type(error)), plain_args(error)))


def lineage(error: type[BaseException]) -> list[str]:
    """Class names from the most derived down to the first built-in one."""
    names = []
    for cls in error.__mro__:
        names.append(cls.__name__)
        if cls.__module__ == "builtins":
            break
    return names


def plain_args(error: BaseException) -> tuple[Any, ...]:
    return tuple(a if type(a) in (int, float, str, bool, type(None)) else str(a) for a in error.args)


# ---------------------------------------------------------------------------------------------------------------------
# The answer's side
# ---------------------------------------------------------------------------------------------------------------------


class AnswerSide(Channel):
    """Does what the tests ask with the answer's module, which is object 0."""

    def serve(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        name, args, kwargs = request
        result = OPERATIONS[name](*args, **kwargs)
        # A function may change what it was given, and the tests may look: send lists, dicts and the like back.
        changed = {i: a for i, a in enumerate(args) if i and type(a) in (list, dict, set, bytearray)}
        return ("value", result, changed if name == "call" else {})

    def dump(self, message: Any) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=4)  # from 5 on, arrays come as buffers, one type more
        pickler.persistent_id = self.handle  # type: ignore[method-assign]
        pickler.dump(message)
        return buffer.getvalue()

    def load(self, data: bytes) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self.resolve  # type: ignore[method-assign]
        return unpickler.load()

    def handle(self, obj: Any) -> tuple[Any, ...] | None:
        """None for what crosses by value, or what the tests' side makes a `Remote` or an exception class of."""
        cls = type(obj)
        if obj is None or crosses(cls) or obj is Ellipsis:
            return None
        if isinstance(obj, Callback):
            return ("tests", obj.number)
        if isinstance(obj, type):
            if crosses(obj):
                return None
            if issubclass(obj, BaseException):
                return ("exception", lineage(obj))
        if (getattr(obj, "__module__", None), getattr(obj, "__name__", None)) in BUILDERS:
            return None
        base = next((base for base in BASES if isinstance(obj, base)), None)
        # str(obj) of an enumerated string is its name.
        value = () if base is None else (str.__str__(obj) if base is str else base(obj),)
        return ("answer", self.keep(obj), value)

    def resolve(self, reference: tuple[Any, ...]) -> Any:
        kind, number = reference[:2]
        return self.objects[number] if kind == "answer" else Callback(self, number)


class Callback:
    """A function of the tests, in the answer's hands: it can be called, and that is all."""

    def __init__(self, channel: Channel, number: int):
        self.channel, self.number = channel, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outcome, *rest = self.channel.ask(self.number, args, kwargs)
        if outcome == "raised":
            raise local_exception(tuple(rest[0]))(*rest[1])
        return rest[0]


def crosses(cls: type) -> bool:
    """Whether instances of exactly this type go by value."""
    name = (cls.__module__, cls.__qualname__)
    if cls.__module__ == "numpy.dtypes":  # what numpy.dtype makes
        return True
    return name in PLAIN_TYPES or (cls.__module__ == "numpy" and hasattr(cls, "dtype") and hasattr(cls, "item"))


def _attribute(obj: Any, name: str) -> Any:
    return getattr(obj, name)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": _attribute,
    "setattr": setattr,
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "isinstance": lambda cls, obj: isinstance(obj, cls),
    "enter": lambda obj: obj.__enter__(),
    "exit": lambda obj, *error: obj.__exit__(None, None, None),
    **{f.__name__: f for f in (len, iter, next, reversed, str, repr, hash, bool, int, float, round, abs, format)},
    **{
        name: getattr(operator, name)
        for name in "getitem setitem delitem contains eq ne lt le gt ge index neg pos invert "
        "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
    },
}


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda obj, other: operation(other, obj)


for _name in "add sub mul truediv floordiv mod pow matmul and_ or_ xor".split():
    OPERATIONS["r" + _name] = _reflected(getattr(operator, _name))


# ---------------------------------------------------------------------------------------------------------------------
# The tests' side
# ---------------------------------------------------------------------------------------------------------------------


class TestsSide(Channel):
    """Holds what the tests know. Takes nothing from the answer but plain data and references."""

    def request(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Have an operation done over there, and return its result or raise its error."""
        try:
            outcome, *rest = self.ask(name, args, kwargs)
            if outcome == "raised":
                names, error_args = rest
                if not all(isinstance(n, str) for n in names):
                    raise AnswerGone("the answer's process sent a malformed error")
            else:
                result, changed = rest
                for i, new in changed.items():
                    overwrite(args[i], new)
                return result
        except (
            OSError,
            EOFError,
            pickle.UnpicklingError,
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
        ) as error:
            self.broken = True
            raise AnswerGone(f"no sensible reply from the answer's process: {error}") from error
        except AnswerGone:
            self.broken = True
            raise
        raise local_exception(tuple(names))(*error_args)

    def serve(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        number, args, kwargs = request
        return ("value", self.objects[number](*args, **kwargs))

    def dump(self, message: Any) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=5)
        pickler.persistent_id = self.handle  # type: ignore[method-assign]
        pickler.dump(message)
        return buffer.getvalue()

    def load(self, data: bytes) -> Any:
        return AllowedTypesOnly(io.BytesIO(data), self).load()

    def handle(self, obj: Any) -> tuple[Any, ...] | None:
        if type(obj) is Remote:
            return ("answer", object.__getattribute__(obj, "_number"))
        # A library's function goes by its name; the tests' own exist here only.
        if isinstance(obj, types.MethodType) or (isinstance(obj, types.FunctionType) and not by_name(obj)):
            return ("tests", self.keep(obj))
        return None


def by_name(function: types.FunctionType) -> bool:
    return function.__module__ not in TEST_MODULES and "<" not in function.__qualname__


class AllowedTypesOnly(pickle.Unpickler):
    """Unpickling runs whatever functions the data names. This one knows a short list of harmless ones."""

    def __init__(self, data: io.BytesIO, channel: TestsSide):
        super().__init__(data)
        self.channel = channel

    def find_class(self, module: str, name: str) -> Any:
        scalar = module == "numpy" and name.rstrip("0123456789_") in ("int", "uint", "float", "bool", "complex", "str")
        if (module, name) in PLAIN_TYPES | BUILDERS or scalar:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} may not cross")

    def persistent_load(self, reference: Any) -> Any:
        kind, *rest = reference
        if kind == "answer":
            return Remote(self.channel, *rest)
        if kind == "exception":
            return local_exception(tuple(rest[0]))
        return self.channel.objects[rest[0]]


class Remote:
    """An object of the answer's process. What is done to it is done there."""

    def __init__(self, channel: TestsSide, number: int, value: tuple[Any, ...]):
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_met", False)  # made from plain data of the tests, an expected value perhaps

    def __getattr__(self, name: str) -> Any:
        return _request(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _request(self, "setattr", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _request(self, "call", *args, **kwargs)

    def __instancecheck__(self, obj: Any) -> bool:
        return bool(_request(self, "isinstance", obj))

    def __eq__(self, other: object) -> Any:
        return _compare(self, "eq", other)

    def __ne__(self, other: object) -> Any:
        return _compare(self, "ne", other)

    def __hash__(self) -> int:
        return int(_request(self, "hash"))

    def __bool__(self) -> bool:
        return bool(_plain(self, "bool"))


def _request(remote: Remote, operation: str, *args: Any, **kwargs: Any) -> Any:
    return _marked(remote, object.__getattribute__(remote, "_channel").request(operation, remote, *args, **kwargs))


def _marked(remote: Remote, result: Any) -> Any:
    """What an object that met the tests' data returns has met them too."""
    if type(result) is Remote and object.__getattribute__(remote, "_met"):
        object.__setattr__(result, "_met", True)
    return result


def _plain(remote: Remote, operation: str, *args: Any) -> Any:
    """
    A number or truth of an object, unless it met the tests' data: in `abs(answer - expected) < tolerance` the answer's own
    operators would decide.
    """
    if object.__getattribute__(remote, "_met"):
        raise TypeError(f"{operation}() of an object of the answer that comes of arithmetic or order with plain data")
    return _request(remote, operation, *args)


def _compare(remote: Remote, operation: str, other: Any) -> Any:
    """The answer's own == decides between two of its objects, never between one of them and what a test expects."""
    if type(other) is Remote:
        return _request(remote, operation, other)
    value = object.__getattribute__(remote, "_value")
    if not value:
        return NotImplemented
    return getattr(operator, operation)(value[0], other)


def _method(operation: str, request: Callable[..., Any] = _request) -> Callable[..., Any]:
    def method(self: Remote, *args: Any) -> Any:
        return request(self, operation, *args)

    return method


def _binary(operation: str) -> Callable[..., Any]:
    """Arithmetic and order with plain data must not yield plain data: that would hand the expected value to the answer."""

    def method(self: Remote, other: Any) -> Any:
        value = object.__getattribute__(self, "_value")
        if type(other) is not Remote and value and hasattr(operator, operation):
            return getattr(operator, operation)(value[0], other)
        result = _request(self, operation, other)
        if type(other) is Remote:
            return _marked(other, result)
        if type(result) is Remote:
            object.__setattr__(result, "_met", True)
            return result
        raise TypeError(f"an object of the answer and a {type(other).__name__} cannot be compared by {operation!r}")

    return method


for _name in "len iter next reversed str repr neg pos invert enter exit".split():
    setattr(Remote, f"__{_name}__", _method(_name))
for _name in "int float round abs index".split():
    setattr(Remote, f"__{_name}__", _method(_name, _plain))
for _name in "getitem setitem delitem contains".split():
    setattr(Remote, f"__{_name}__", _method(_name))
for _name in "lt le gt ge".split():
    setattr(Remote, f"__{_name}__", _binary(_name))
for _name in "add sub mul truediv floordiv mod pow matmul and_ or_ xor".split():
    setattr(Remote, f"__{_name.rstrip('_')}__", _binary(_name))
    setattr(Remote, f"__r{_name.rstrip('_')}__", _binary("r" + _name))


def overwrite(old: Any, new: Any) -> None:
    """Give a mutable argument the contents that the call left it with."""
    if type(old) is not type(new):
        raise TypeError("an argument came back with another type")
    if isinstance(old, (list, bytearray)):
        old[:] = new
    else:
        old.clear()
        old.update(new)


_EXCEPTIONS: dict[tuple[str, ...], type[Exception]] = {}


def local_exception(names: tuple[str, ...]) -> type[Exception]:
    """An exception class of this process with that lineage, the same one each time."""
    if names not in _EXCEPTIONS:
        base = getattr(builtins, names[0], None) if len(names) == 1 else local_exception(names[1:])
        if not (isinstance(base, type) and issubclass(base, Exception)):
            base = RuntimeError  # SystemExit and its kind must not end the tests' process
        _EXCEPTIONS[names] = base if len(names) == 1 else type(names[0], (base,), {})
    return _EXCEPTIONS[names]
