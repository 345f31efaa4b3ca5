"""What a pickle of plain data may name, and how it is built: by code of our own from checked arguments."""

from __future__ import annotations

import collections
import math
import re
from typing import Any

import numpy as np

OBJECT = 512  # bytes of an array or matrix without its contents
MOST = 1 << 63
DEPTH = 100  # levels of containers in containers
ODD_KEYS = 1000  # keys whose hashes a file can choose to be equal, which makes a dictionary quadratic
SCALARS = (str, bytes, int, float, complex, bool, np.generic, type(None))
DTYPE = re.compile(r"b1|\?|[iu][1248]|f[248]|c8|c16|[SU][1-9][0-9]{0,5}")
MATRIX_STATE = {"_shape", "indptr", "indices", "data"}
_FLAGS = ("has_sorted_indices", "has_canonical_format")
# What scipy finds out again; taken on trust, a false flag would lead its compiled code astray.
MATRIX_EXTRAS = {"maxprint", "format", *(f"{old}_{flag}" for flag in _FLAGS for old in ("", "_cs_matrix_"))}

_ARRAYS = {"_reconstruct": "reconstruct", "scalar": "scalar"}
_PLAIN = {
    kind: kind for kind in ("list", "dict", "set", "frozenset", "int", "float", "str", "bytes", "complex", "object")
}
KNOWN: dict[tuple[str, str], str] = {
    **{(f"numpy.{core}.multiarray", name): kind for core in ("core", "_core") for name, kind in _ARRAYS.items()},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "frombuffer" for core in ("core", "_core")},
    **{("numpy", name): name for name in ("ndarray", "dtype")},
    **{(f"scipy.sparse.{file}", "csr_matrix"): "csr_matrix" for file in ("csr", "_csr")},
    **{("collections", name): name for name in ("defaultdict", "OrderedDict")},
    **{(module, name): kind for module in ("builtins", "__builtin__") for name, kind in _PLAIN.items()},
    **{(module, "_reconstructor"): "instance" for module in ("copyreg", "copy_reg")},
    ("_codecs", "encode"): "encode",
}
FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}


class Refused(ValueError):
    """Something in a pickle that is not plain data."""


class Name:
    """A known name on the stack; never the object of that name, and nothing that a pickle could change."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


class Values:
    """Builds values within a budget of copied bytes, so that no value is multiplied by naming it often."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.odd_keys = 0
        self.blank: dict[int, Any] = {}  # made but not yet filled, by id

    def known(self, module: Any, name: Any) -> Name:
        """The stand-in for a global."""
        if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in KNOWN:
            raise Refused(f"the name {_shown(module)}.{_shown(name)} is refused: it is no plain container or array")
        return Name(KNOWN[module, name])

    def build(self, name: Any, arguments: Any, *, new: bool) -> Any:
        """What a pickle asks to call with arguments (or, ``new``, to make an instance of)."""
        kind = name.kind if isinstance(name, Name) and isinstance(arguments, tuple) else ""
        if new and kind != "csr_matrix":
            raise Refused(f"an instance of {kind or 'something unknown'} is refused")
        if kind in ("reconstruct", "csr_matrix", "instance"):
            return self._instance(kind, arguments)
        if kind in ("scalar", "frombuffer", "dtype"):
            return {"scalar": self._scalar, "frombuffer": self._from_buffer, "dtype": self._dtype}[kind](arguments)
        return self._plain(kind, arguments)

    def fill(self, blank: Any, state: Any) -> None:
        """Give a fresh array, dtype or matrix its contents, once."""
        if self.blank.pop(id(blank), None) is None:
            raise Refused(f"setting the state of a {type(blank).__name__} is refused")
        if isinstance(blank, np.ndarray):
            if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1 or not isinstance(state[3], bool | int):
                raise Refused("an array with an unusual state is refused")
            shape, dtype = self._array_parts(*state[1:3], state[4])
            blank.__setstate__((1, shape, dtype, bool(state[3]), self._raw(state[4])))  # type: ignore[arg-type]
        elif isinstance(blank, np.dtype):
            usual = np.dtype(blank.str).__reduce__()[2]
            if not isinstance(state, tuple) or len(state) != 8 or (state[0], *state[2:]) != (usual[0], *usual[2:]):
                raise Refused("a dtype with an unusual state is refused")
            if state[1] not in ("<", ">", "|", "="):
                raise Refused("a dtype of unknown byte order is refused")
            blank.__setstate__((usual[0], state[1], *usual[2:]))  # type: ignore[attr-defined]
        else:
            matrix = _matrix(state)
            self._spend(matrix.indptr.nbytes + matrix.indices.nbytes)
            vars(blank).update(vars(matrix))

    def extend(self, items: list[Any], target: Any, pairs: bool) -> None:
        """Append to a list, add to a set, or (``pairs``) set keys of a dictionary."""
        if pairs and isinstance(target, dict) and len(items) % 2 == 0:
            target.update(zip(map(self._key, items[::2]), items[1::2], strict=True))
        elif not pairs and isinstance(target, list):
            target.extend(items)
        elif not pairs and isinstance(target, set):
            target.update(map(self._key, items))
        else:
            raise Refused(f"putting {len(items)} items into a {type(target).__name__} is refused")

    def collect(self, code: bytes, items: list[Any]) -> Any:
        """The tuple, list, dictionary or frozenset of the values above a mark."""
        if code == b"d":
            made: dict[Any, Any] = {}
            self.extend(items, made, pairs=True)
            return made
        return tuple(items) if code == b"t" else items if code == b"l" else frozenset(map(self._key, items))

    def _key(self, key: Any) -> Any:
        """A key: a number or text, or a flat tuple of them (hashing deep tuples would overflow the stack)."""
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(one, SCALARS) for one in parts):
            raise Refused(f"a {type(key).__name__} as a key is refused")
        if isinstance(key, tuple | complex | np.complexfloating) or (isinstance(key, int) and abs(key) >= MOST):
            self.odd_keys += 1
            if self.odd_keys > ODD_KEYS:
                raise Refused(f"more than {ODD_KEYS} keys that are tuples, complex or beyond 64 bits are refused")
        return key

    def check_plain(self, value: Any) -> None:
        """Refuse names and unfilled arrays as values, and containers nested too deeply."""
        if self.blank:
            raise Refused("an array, dtype or matrix without contents is refused")
        level, seen = [value], {id(value)}
        for _ in range(DEPTH):
            if not level:
                return
            inner = {id(child): child for one in level for child in _children(one)}
            level = [child for key, child in inner.items() if key not in seen]
            seen.update(inner)
        raise Refused(f"containers in more than {DEPTH} levels are refused")

    def _spend(self, size: int) -> None:
        self.budget -= size
        if self.budget < 0:
            raise Refused("values that expand to many times the file's size are refused")

    def _raw(self, raw: Any) -> bytes:
        """Raw array contents; text from Python 2 is latin-1."""
        if not isinstance(raw, str | bytes | bytearray):
            raise Refused("array contents that are no bytes are refused (object arrays)")
        return raw.encode("latin-1") if isinstance(raw, str) else bytes(raw)

    def _array_parts(self, shape: Any, dtype: Any, raw: Any) -> tuple[Any, Any]:
        """The checked shape and dtype of an array of these bytes."""
        if not isinstance(dtype, np.dtype) or id(dtype) in self.blank:
            raise Refused("an array without a dtype is refused")
        if not isinstance(shape, tuple) or len(shape) > 32 or not all(_count(n, 1 << 48) for n in shape):
            raise Refused("an array with an unusual shape is refused")
        self._spend(2 * len(raw) if isinstance(raw, str | bytes | bytearray) else 0)
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError(f"an array {shape} of {dtype} in {len(raw)} bytes")
        return shape, dtype

    def _instance(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        """A blank array or matrix."""
        named = [one.kind if isinstance(one, Name) else one for one in arguments]
        made: Any
        if kind == "reconstruct" and named in (["ndarray", (0,), "b"], ["ndarray", (0,), b"b"]):
            made = np.ndarray((0,), np.int8)
        elif (kind, named) in (("csr_matrix", []), ("instance", ["csr_matrix", "object", None])):
            from scipy.sparse import csr_matrix

            made = csr_matrix((1, 1), dtype=np.float32)
        else:
            raise Refused(f"{kind} with these arguments is refused")
        self._spend(OBJECT)
        self.blank[id(made)] = made
        return made

    def _dtype(self, arguments: tuple[Any, ...]) -> np.dtype[Any]:
        spec = arguments[0] if arguments else None
        if (
            not isinstance(spec, str)
            or not DTYPE.fullmatch(spec)
            or not all(type(o) in (int, bool) for o in arguments[1:])
        ):
            raise Refused(f"the dtype {_shown(spec)!r} is refused (object arrays are pickles): store plain numbers")
        made = np.dtype(spec, copy=True)  # type: ignore[call-overload]
        self.blank[id(made)] = made
        return made

    def _scalar(self, arguments: tuple[Any, ...]) -> Any:
        dtype, raw = arguments
        self._array_parts((), dtype, raw)
        return np.frombuffer(self._raw(raw), dtype)[0]

    def _from_buffer(self, arguments: tuple[Any, ...]) -> np.ndarray:
        raw, dtype, shape, order = arguments
        self._array_parts(shape, dtype, raw)
        if order not in ("C", "F"):
            raise Refused("an array of unknown order is refused")
        return np.frombuffer(bytearray(self._raw(raw)), dtype).reshape(shape, order=order)

    def _plain(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        first = arguments[0] if arguments else ()
        if kind == "defaultdict" and len(arguments) <= 1:
            return collections.defaultdict(FACTORIES[first.kind] if isinstance(first, Name) else None)
        if kind == "complex" and len(arguments) == 2 and all(type(part) is float for part in arguments):
            return complex(*arguments)
        if kind == "encode" and isinstance(first, str) and arguments[1:] in (("latin1",), ("latin-1",)):
            self._spend(len(first))
            return first.encode("latin-1")
        if kind == "bytes" and not arguments:
            return b""
        if kind in ("set", "frozenset", "OrderedDict") and len(arguments) <= 1 and isinstance(first, list | tuple):
            self._spend(64 * len(first))
            if kind != "OrderedDict":
                return (set if kind == "set" else frozenset)(map(self._key, first))
            pairs = [(self._key(key), value) for key, value in first]
            return collections.OrderedDict(pairs)
        raise Refused(f"calling {kind or 'something unknown'} with these arguments is refused")


def _shown(text: Any) -> str:
    """The beginning of a text for an error, or of what type it is: a pickle can nest what it names deeply."""
    return text[:60] if isinstance(text, str) else type(text).__name__


def _count(value: Any, bound: int) -> bool:
    """Whether a value is a whole number in ``0..bound - 1``."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= int(value) < bound


def _children(value: Any) -> list[Any]:
    """What a container holds; nothing for plain values."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Name):
        raise Refused(f"the name {value.kind} as a value is refused")
    return []


def _matrix(state: Any) -> Any:
    """A csr matrix whose indices are all checked: scipy's own code trusts them."""
    if not isinstance(state, dict) or not set(state) >= MATRIX_STATE or set(state) - MATRIX_STATE - MATRIX_EXTRAS:
        raise Refused("a sparse matrix with an unusual state is refused")
    shape, indptr, indices, data = (state[name] for name in ("_shape", "indptr", "indices", "data"))
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(_count(n, 1 << 31) for n in shape):
        raise Refused("a sparse matrix with an unusual shape is refused")
    for array, kinds in ((indptr, "iu"), (indices, "iu"), (data, "biufc")):
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
            raise Refused("a sparse matrix of unusual arrays is refused")
    starts, columns = indptr.astype(np.int64), indices.astype(np.int64)
    if len(starts) != shape[0] + 1 or starts[0] != 0 or starts[-1] != len(columns) or len(columns) != len(data):
        raise ValueError("a sparse matrix whose rows do not fit its entries")
    if (np.diff(starts) < 0).any() or (columns.size and (columns.min() < 0 or columns.max() >= shape[1])):
        raise ValueError(f"a sparse matrix {shape} with places outside of it")
    from scipy.sparse import csr_matrix

    return csr_matrix((data, columns, starts), shape=shape)
