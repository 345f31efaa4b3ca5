"""Pickles: plain data comes back as pickled, everything else is refused and nothing of it runs."""

from __future__ import annotations

import collections
import io
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from fedjax_pfl.data import pickles
from fedjax_pfl.data.pickles import read_pickle
from fedjax_pfl.data.sources import DATA_VARIABLE

PLAIN: dict[Any, Any] = {
    "list": [1, -5, 300, 10**30, 2.5, None, True, "x", "é中", b"\xff\x00", b"", 1j],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    ("key", 3): {1, 2},
    4: frozenset([3]),
    "ordered": collections.OrderedDict(a=1, b=2),
    "default": collections.defaultdict(list, {1: [2]}),
    "dtype": np.dtype("f8"),
    "scalar": np.float32(3),
}
ARRAYS = {
    "matrix": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "text": np.array(["ab", "c"]),
    "bytes": np.array([b"ab"]),
    "empty": np.zeros((0, 3), np.float32),
    "point": np.array(5.0),
    "swapped": np.arange(3, dtype=">i2"),
    "bools": np.array([True, False]),
}
MATRIX = scipy.sparse.csr_matrix(np.array([[0, 1.5, 0], [2, 0, 0]], np.float32))


def loads(data: bytes) -> Any:
    return read_pickle(io.BytesIO(data), name="pickle")


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = (function, arguments)

    def __reduce__(self) -> Any:
        return self.parts


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_comes_back(protocol: int) -> None:
    found = loads(pickle.dumps([PLAIN, ARRAYS, MATRIX], protocol))
    assert found[0] == PLAIN
    for key, value in PLAIN.items():
        assert type(found[0][key]) is type(value)
    assert found[0]["default"][99] == []
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[1][name], array)
        assert found[1][name].shape == array.shape
        assert found[1][name].dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found[2].toarray(), MATRIX.toarray())
    assert found[2].dtype == np.float32


def test_shared_values_stay_shared() -> None:
    array, inner = np.arange(3), [1]
    found = loads(pickle.dumps([array, array, inner, inner]))
    assert found[0] is found[1]
    assert found[2] is found[3]


def test_python_2_bytes_are_latin_1() -> None:
    """An array and a dictionary as Python 2 wrote them with protocol 2: strings of bytes, old module names."""
    raw = b"\xff\x00\x80\x01"
    data = (
        b"\x80\x02}q\x00(U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85q\x04"
        b"U\x01bq\x05\x87q\x06Rq\x07(K\x01K\x02K\x02\x86q\x08cnumpy\ndtype\nq\tU\x02u1q\nK\x00K\x01\x87q\x0bRq\x0c"
        b"(K\x03U\x01|q\rNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x0eb\x89U\x04" + raw + b"q\x0ftq\x10b"
        b"U\x05labelq\x11]q\x12(K\x03K\x04eu."
    )
    found = loads(data)
    assert found["label"] == [3, 4]
    np.testing.assert_array_equal(found["data"], np.frombuffer(raw, np.uint8).reshape(2, 2))
    assert loads(b"S'\\xe9\\n'\np0\n.") == "é\n"  # protocol 0


def test_paths_streams_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "some.pickle"
    path.write_bytes(pickle.dumps([1, 2]))
    assert read_pickle(path) == read_pickle(str(path)) == read_pickle(io.BytesIO(path.read_bytes())) == [1, 2]
    with pytest.raises(FileNotFoundError, match="none: no such file"):
        read_pickle(tmp_path / "none")
    with pytest.raises(ValueError, match=r"some\.pickle: holds more than 5 bytes"):
        read_pickle(path, limit=5)
    with pytest.raises(ValueError, match=r"^the name: byte 0"):
        read_pickle(io.BytesIO(b""), name="the name")


def attacks(marker: Path) -> dict[str, bytes]:
    """Pickles that create ``marker``, or try to, when a careless reader loads them."""
    command, code = f"touch {marker}", f"open({str(marker)!r}, 'w')"
    text = repr(command).encode()
    attribute = f"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(S{command!r}\ntR.".encode()
    evil = Call(os.system, command)
    return {
        "os.system": b"cos\nsystem\n(S" + text + b"\ntR.",
        "posix.system, stack global": pickle.dumps(evil, 4),
        "posix.system, global": pickle.dumps(evil, 2),
        "builtins.eval": pickle.dumps(Call(eval, code), 4),
        "builtins.exec": pickle.dumps(Call(exec, code), 2),
        "nested getattr": attribute,
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0aos.systemXX\x93.",
        "numpy.load": pickle.dumps(Call(np.load, str(marker)), 4),
        "inst": b"(S" + text + b"\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS" + text + b"\no.",
        "object array": pickle.dumps(np.array([evil, 1], dtype=object), 4),
        "in a dictionary": pickle.dumps({"data": np.arange(3), "labels": evil}, 2),
        "in a default factory": pickle.dumps(Call(collections.defaultdict, Call(eval, code)), 4),
        "in a matrix": pickle.dumps(Call(scipy.sparse.csr_matrix, evil), 4),
        "as a state": b"cnumpy\ndtype\n(S'f8'\nI00\nI01\ntR" + b"(cos\nsystem\n(S" + text + b"\ntRtb.",
    }


@pytest.mark.parametrize("name", attacks(Path("marker")))
def test_nothing_runs(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(ValueError, match=r"^bad file: byte \d+"):
        read_pickle(io.BytesIO(attacks(marker)[name]), name="bad file")
    assert not marker.exists()


def test_the_attacks_would_work(tmp_path: Path) -> None:
    """The marker shows what the test above relies on: Python's own reader runs these."""
    for name in ("os.system", "posix.system, stack global", "builtins.eval", "nested getattr", "inst", "object array"):
        marker = tmp_path / "marker"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            pickle.loads(attacks(marker)[name])
        assert marker.exists(), name
        marker.unlink()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cos\nsystem\n.", r"the name os\.system is refused: .*nothing of it was executed"),
        (pickle.dumps(Call(np.frombuffer, b"abc"), 4), r"the name numpy\.frombuffer is refused|numpy.*is refused"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"os\.system is refused"),
        (b"c__builtin__\nlist\n.", "the name list as a value"),
        (b"(c__builtin__\nlist\nl.", "the name list as a value"),
        (b"c__builtin__\nlist\n}S'x'\nI1\nsb.", "setting the state of a Name is refused"),
        (b"ccollections\nOrderedDict\n)R}S'x'\nI1\nsb.", "setting the state of a OrderedDict is refused"),
        (b"}}S'x'\nI1\nsb.", "setting the state of a dict is refused"),
        (b"c__builtin__\nlist\n)\x81.", "an instance of list is refused"),
        (b"c__builtin__\nset\n(I1\ntR.", "calling set with these arguments"),
        (b"c__builtin__\nobject\n)R.", "calling object"),
        (b"I5\n)R.", "calling something unknown"),
        (b"P1\n.", "persistent ids"),
        (b"I1\nQ.", "persistent ids"),
        (b"\x82\x01.", "extensions"),
        (b"\x97.", "buffers"),
        (b"}]I1\ns.", "a list as a key"),
        (b"I1\nI2\na.", "putting 1 items into a int"),
        (b"cnumpy\ndtype\n(S'O8'\nI00\nI01\ntR.", "the dtype 'O8' is refused"),
        (b"cnumpy\ndtype\n(S'V8'\nI00\nI01\ntR.", "the dtype 'V8' is refused"),
        (b"cnumpy\ndtype\n(S'f8'\nI00\nI01\ntR.", "without contents"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I9\ntS'b'\ntR.", "reconstruct with these"),
        (pickle.dumps(np.array([{}, None]), 4), r"the dtype 'O\d' is refused"),
        (pickle.dumps(np.zeros(2, [("a", "f4")]), 4), r"the dtype 'V4' is refused"),
        (b"I1\nI2\n.", "2 values"),
        (b"I1\n.x", "bytes after the end"),
        (b"\x80\x09I1\n.", "protocol 9"),
        (b"", "0 follow"),
        (b"cnumpy\ndtype\n(" + b")" + b"\x85" * 50_000 + b"tR.", "the dtype 'tuple' is refused"),
        (b")" + b"\x85" * 50_000 + b"\x8c\x01a\x93.", r"the name tuple\.a is refused"),
        (b"X\xff\xff\x00\x00" + b"a" * 65535 + b"\x8c\x01a\x93.", r"the name a{60}\.a is refused"),
    ],
)  # fmt: skip
def test_refusals_say_why(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loads(data)


def array_pickle(change: Any) -> bytes:
    """An array whose state a function changed."""

    class Strange:
        def __reduce__(self) -> Any:
            function, arguments, state = np.arange(4.0).__reduce__()
            return function, arguments, change(list(state))

    return pickle.dumps(Strange(), 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: (*state[:1], (5,), *state[2:]),  # more than the bytes
        lambda state: (*state[:1], (1 << 40,), *state[2:]),
        lambda state: (*state[:1], (-4,), *state[2:]),
        lambda state: (*state[:1], (1,) * 40, *state[2:]),
        lambda state: (*state[:1], (2.0, 2), *state[2:]),
        lambda state: (*state[:2], 3, *state[3:]),
        lambda state: (*state[:4], [1, 2, 3, 4]),
        lambda state: (*state[:4], state[4][:-1]),
        lambda state: (7, *state[1:]),
        lambda state: tuple(state[:4]),
        lambda state: {"shape": 4},
    ],
)
def test_array_states_are_checked(change: Any) -> None:
    with pytest.raises(ValueError, match="byte"):
        loads(array_pickle(change))


def test_an_array_is_filled_once() -> None:
    data = pickle.dumps(np.arange(4.0), 2)
    state = data[data.rindex(b"(K\x01") : -1]  # the state and BUILD, which refers to memoised values
    assert loads(data).shape == (4,)
    with pytest.raises(ValueError, match="setting the state of a ndarray"):
        loads(data[:-1] + b"}b.")
    assert state.endswith(b"b")


@pytest.mark.parametrize("fault", ["column", "negative", "rows", "start", "order", "data", "two axes", "extra"])
@pytest.mark.filterwarnings("ignore")
def test_matrices_with_places_outside_are_refused(fault: str) -> None:
    matrix = MATRIX.copy()
    if fault == "column":
        matrix.indices[0] = 3
    elif fault == "negative":
        matrix.indices[0] = -1
    elif fault == "rows":
        matrix.indptr = np.append(matrix.indptr, 2)
    elif fault == "start":
        matrix.indptr[0] = 1
    elif fault == "order":
        matrix.indptr[1] = 5
    elif fault == "data":
        matrix.data = matrix.data[:1]
    elif fault == "two axes":
        matrix.indices = matrix.indices[None]
    else:
        matrix.strange = 1
    with pytest.raises(ValueError, match="a sparse matrix"):
        loads(pickle.dumps(matrix, 2))


def test_a_false_flag_of_a_matrix_is_not_believed() -> None:
    matrix = scipy.sparse.csr_matrix((np.ones(2), np.array([2, 0]), np.array([0, 2])), shape=(1, 3))
    matrix.has_sorted_indices = True
    assert not loads(pickle.dumps(matrix)).has_sorted_indices


@pytest.mark.parametrize(
    "data",
    [
        b"\x8e" + (1 << 62).to_bytes(8, "little") + b"abc.",  # a string of exabytes
        b"B\xff\xff\xff\xffabc.",
        b"\x8b\xff\xff\xff\x7fabc.",
        b"\x95" + (1 << 62).to_bytes(8, "little") + b"I1\nr\xff\xff\xff\xffj\xff\xff\xff\xfe.",  # a memo of gigabytes
        b"(" + b"I1\n" * 1000 + b"lq\x00" + b"0c__builtin__\nset\nh\x00\x85R" * 3000 + b".",  # copies of a list
        b"X\x10\x27\x00\x00" + b"a" * 10000 + b"q\x000" + b"c_codecs\nencode\n(h\x00S'latin1'\ntR0" * 3000 + b"N.",
        b"cscipy.sparse._csr\ncsr_matrix\nq\x00" + b"h\x00)\x81" * 60_000,  # matrices without contents
        b"]" * 20_000 + b"a" * 19_999 + b".",  # a list in a list in a list
        b"}" + b")" + b"\x85" * 100_000 + b"I1\ns.",  # a tuple in a tuple as a key
        b"]" + b"2a" * 20_000,  # a list that holds itself
        b"(" * 50_000,
    ],
)
def test_memory_stays_bounded(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="byte"):
            loads(data)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "key",
    [lambda i: i * (2**61 - 1), lambda i: complex(-1_000_003 * i, i), lambda i: (i, 0)],
    ids=["int", "complex", "tuple"],
)
def test_keys_of_equal_hashes_are_bounded(key: Callable[[int], Any]) -> None:
    """A dictionary of them takes a time that is quadratic in the size of the file."""
    assert len({hash(key(i)) for i in range(9)}) == 1 or isinstance(key(1), tuple)
    few = {key(i): i for i in range(20, 120)}
    assert loads(pickle.dumps(few, 2)) == few
    for many in ({key(i): i for i in range(20, 1100)}, {key(i) for i in range(20, 1100)}):
        with pytest.raises(ValueError, match="more than 1000 keys that are tuples, complex or beyond 64 bits"):
            loads(pickle.dumps(many, 2))
    usual = {
        **{i << 40: 0 for i in range(2000)},
        **{str(i): 0 for i in range(2000)},
        **{i + 0.5: 0 for i in range(2000)},
    }
    assert loads(pickle.dumps(usual, 2)) == usual


def test_instructions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "OPERATIONS", 100)
    assert loads(pickle.dumps(list(range(80)), 2))
    with pytest.raises(ValueError, match="more than 100 instructions"):
        loads(b"\x8f0" * 60 + b"N.")


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_every_truncation_is_noticed(protocol: int) -> None:
    data = pickle.dumps([PLAIN, ARRAYS, MATRIX], protocol)
    for end in range(0, len(data), 3):
        with pytest.raises(ValueError, match="pickle: byte"):
            loads(data[:end])


def test_damage_raises_nothing_but_value_errors() -> None:
    rng = np.random.default_rng(0)
    for protocol in (0, 2, 4):
        whole = pickle.dumps([PLAIN, ARRAYS, MATRIX], protocol)
        for _ in range(500):
            data = bytearray(whole)
            for place in rng.integers(len(data), size=3):
                data[place] = rng.integers(256)
            try:
                loads(bytes(data))
            except ValueError as error:
                assert str(error).startswith("pickle: byte")  # noqa: PT017


def test_published_files_agree_with_their_npz() -> None:
    folder = Path(os.environ.get(DATA_VARIABLE, "absent")) / "planetoid"
    if not (folder / "cora.zip").is_file():
        pytest.skip(f"{DATA_VARIABLE} names no folder with planetoid/cora.zip")
    with zipfile.ZipFile(folder / "cora.zip") as archive, np.load(folder / "cora.npz") as whole:
        x, labels = loads(archive.read("ind.cora.allx")), loads(archive.read("ind.cora.ally"))
        np.testing.assert_array_equal(x.toarray(), whole["x"][:1708])
        np.testing.assert_array_equal(labels.argmax(1), whole["y"][:1708])
        graph = loads(archive.read("ind.cora.graph"))
    assert type(graph) is collections.defaultdict
    assert len(graph) == 2708


def test_one_matrix_is_not_multiplied() -> None:
    """A state that many matrices name costs its size each time."""
    matrix = scipy.sparse.csr_matrix(np.ones((1, 400_000), np.float32))
    data = pickle.dumps([[matrix] * 2, matrix], 2)
    assert loads(data)[1].nnz == 400_000
    again = b"cscipy.sparse._csr\ncsr_matrix\n)\x81h\xf0b"
    state = pickle.dumps(vars(matrix), 2)
    crowd = state[:-1] + b"q\xf0" + again * 50 + b"."
    with pytest.raises(ValueError, match="expand to many times the file's size"):
        loads(crowd)
    assert loads(state[:-1] + b"q\xf00" + again + b".").nnz == 400_000
