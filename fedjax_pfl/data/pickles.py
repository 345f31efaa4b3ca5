"""Pickles of plain data: a small machine that builds containers, numbers, text and arrays, and calls nothing.

Python's unpickler is not used: a name in a pickle stands for an entry of ``pickle_values.KNOWN``, never for the object
that has this name, and an instruction that is not listed here does not exist.
"""

from __future__ import annotations

import codecs
import struct
from pathlib import Path
from typing import IO, Any

from fedjax_pfl.data.files import read_bounded
from fedjax_pfl.data.pickle_values import Refused, Values

LIMIT = 1 << 30  # bytes of a file
OPERATIONS = 5_000_000  # a byte of a pickle can stand for an object of 200 bytes, so these are bounded too
SLACK = 16 << 20  # bytes that values may take beyond a multiple of the file

FIXED = {  # instruction: the number behind it
    b"J": "<i", b"K": "<B", b"M": "<H", b"G": ">d", b"h": "<B", b"j": "<I", b"q": "<B", b"r": "<I", b"\x80": "<B",
    b"\x95": "<Q",
}  # fmt: skip
COUNTED = {  # instruction: the length of the bytes behind it
    b"T": "<i", b"U": "<B", b"B": "<I", b"C": "<B", b"\x8e": "<Q", b"\x96": "<Q", b"X": "<I", b"\x8c": "<B",
    b"\x8d": "<Q", b"\x8a": "<B", b"\x8b": "<i",
}  # fmt: skip
CONSTANTS: dict[bytes, Any] = {b"N": None, b"\x88": True, b"\x89": False}
FRESH: dict[bytes, Any] = {b"}": dict, b"]": list, b")": tuple, b"\x8f": set}
TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


def read_pickle(source: str | Path | IO[bytes], *, name: str = "", limit: int = LIMIT) -> Any:
    """The value of one pickle (protocols 0 to 5): plain containers, numbers, text, numpy arrays and csr matrices.

    source: a path or a binary stream, read to its end; ``name`` is what errors call it. Byte strings of Python 2 become
    text by latin-1. limit: the most bytes that are read; memory stays within a small multiple of the file's size,
    and 300 bytes an instruction, of which ``OPERATIONS`` are done.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another name or instruction than those of plain data (nothing is executed), damaged, too large.
    """
    name = name or str(source if isinstance(source, str | Path) else getattr(source, "name", "pickle"))
    if isinstance(source, str | Path):
        if not Path(source).is_file():
            raise FileNotFoundError(f"{name}: no such file")
        with open(source, "rb") as stream:
            data = read_bounded(stream, limit)
    else:
        data = read_bounded(source, limit)
    if len(data) > limit:
        raise ValueError(f"{name}: holds more than {limit} bytes, the most that a pickle here may have")
    machine = _Machine(data)
    try:
        return machine.run()
    except Refused as error:
        raise ValueError(f"{name}: byte {machine.begin}: {error}; nothing of it was executed") from None
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, struct.error) as error:
        reason = str(error)[:100]
        raise ValueError(
            f"{name}: byte {machine.begin}: a damaged or truncated pickle ({reason}): fetch it again"
        ) from error


class _Machine:
    """The stack, the marks on it and the memo of one pickle."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = self.begin = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.values = Values(4 * len(data) + SLACK)

    def run(self) -> Any:
        for _ in range(OPERATIONS):
            self.begin = self.place
            code = self._take(1)
            if code == b".":
                return self._result()
            self._step(code)
        raise Refused(f"more than {OPERATIONS} instructions are refused")

    def _result(self) -> Any:
        if self.place != len(self.data):
            raise ValueError("bytes after the end")
        if len(self.stack) != 1 or self.marks:
            raise ValueError(f"{len(self.stack)} values and {len(self.marks)} marks are left instead of one value")
        self.values.check_plain(self.stack[0])
        return self.stack[0]

    def _step(self, code: bytes) -> None:
        if code in FIXED:
            self._fixed(code, *struct.unpack(FIXED[code], self._take(struct.calcsize(FIXED[code]))))
        elif code in COUNTED:
            (count,) = struct.unpack(COUNTED[code], self._take(struct.calcsize(COUNTED[code])))
            self.stack.append(_counted(code, self._take(count)))
        elif code in b"ILFSVgp":
            self._line(code)
        elif code in CONSTANTS:
            self.stack.append(CONSTANTS[code])
        elif code in FRESH:
            self.stack.append(FRESH[code]())
        elif code in TUPLES:
            self.stack.append(tuple(self._pop(TUPLES[code])))
        elif code in b"c\x93R\x81b":
            self._name(code)
        else:
            self._marked(code)

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.place:
            raise ValueError(f"{count} bytes are promised, {len(self.data) - self.place} follow")
        self.place += count
        return self.data[self.place - count : self.place]

    def _text(self) -> bytes:
        end = self.data.index(b"\n", self.place)
        return self._take(end + 1 - self.place)[:-1]

    def _pop(self, count: int) -> list[Any]:
        """The last ``count`` values, none of them below the last mark."""
        if len(self.stack) - count < (self.marks[-1] if self.marks else 0):
            raise ValueError("too few values on the stack")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def _fixed(self, code: bytes, number: Any) -> None:
        if code in b"JKMG":
            self.stack.append(number)
        elif code in b"hj":
            self.stack.append(self.memo[number])
        elif code in b"qr":
            self.memo[number] = self.stack[-1]
        elif code == b"\x80" and number > 5:
            raise ValueError(f"protocol {number} is unknown")

    def _line(self, code: bytes) -> None:
        text = self._text()
        if code == b"p":
            self.memo[int(text)] = self.stack[-1]
        elif code == b"g":
            self.stack.append(self.memo[int(text)])
        else:
            self.stack.append(_line(code, text))

    def _name(self, code: bytes) -> None:
        """A name, and what is built with one."""
        if code == b"c":
            module, attribute = self._text().decode(), self._text().decode()
            self.stack.append(self.values.known(module, attribute))
        elif code == b"\x93":
            self.stack.append(self.values.known(*self._pop(2)))
        elif code == b"b":
            state = self._pop(1)[0]
            self.values.fill(self.stack[-1], state)
        else:
            name, arguments = self._pop(2)
            self.stack.append(self.values.build(name, arguments, new=code == b"\x81"))

    def _marked(self, code: bytes) -> None:
        if code == b"(":
            self.marks.append(len(self.stack))
        elif code == b"\x94":
            self.memo[len(self.memo)] = self.stack[-1]
        elif code == b"0":
            self._pop(1) if not self.marks or self.marks[-1] < len(self.stack) else self.marks.pop()
        elif code == b"2":
            self.stack.append(self.stack[-1])
        elif code in b"as":
            self.values.extend(self._pop(1 if code == b"a" else 2), self.stack[-1], pairs=code == b"s")
        elif code in b"eu\x90tld1\x91":
            start = self.marks.pop()
            items = self.stack[start:]
            del self.stack[start:]
            if code in b"eu\x90":
                self.values.extend(items, self.stack[-1], pairs=code == b"u")
            elif code != b"1":
                self.stack.append(self.values.collect(code, items))
        else:
            raise Refused(f"instruction {code!r} (persistent ids, extensions, instances, buffers) is refused")


def _counted(code: bytes, data: bytes) -> Any:
    if code in b"TU":
        return data.decode("latin-1")
    if code in b"X\x8c\x8d":
        return data.decode("utf-8", "surrogatepass")
    if code in b"\x8a\x8b":
        return int.from_bytes(data, "little", signed=True)
    return bytearray(data) if code == b"\x96" else data


def _line(code: bytes, text: bytes) -> Any:
    """A value of protocol 0: a number or a string up to the end of the line."""
    if code == b"I":
        return {b"00": False, b"01": True}[text] if text in (b"00", b"01") else int(text)
    if code == b"L":
        return int(text.removesuffix(b"L"))
    if code == b"F":
        return float(text)
    if code == b"V":
        return text.decode("raw-unicode-escape")
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"'\"":
        raise ValueError("a string without quotes")
    return codecs.escape_decode(text[1:-1])[0].decode("latin-1")  # type: ignore[attr-defined]
