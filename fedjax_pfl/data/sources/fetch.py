"""Downloads into the cache folder: over https only, of bounded size, and there whole or not at all."""

from __future__ import annotations

import http.client
import os
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_pfl.data.files import CHUNK

SCHEMES = ("https",)
TIMEOUT = 30.0  # seconds without any answer
LIMIT = 1 << 28


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_scheme(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(address: str, target: Path, check: Callable[[Path], None], limit: int = LIMIT) -> Path:
    """The file at an address, stored as ``target`` unless that exists already.

    check: raises ValueError or OSError where a fetched file is not what it should be; nothing is stored then.

    Raises:
        ValueError: no https address, more than ``limit`` bytes, what ``check`` refuses.
        OSError: no connection, no such file there, fewer bytes than announced, no place to write.
    """
    if target.is_file():
        return target
    _check_scheme(address)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=".partial-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            _copy(address, stream, limit)
        try:
            check(Path(partial))
        except (ValueError, OSError) as error:
            found = str(error).replace(partial, "the answer")
            raise ValueError(f"{address}: is not the data set ({found}): try again later") from error
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)
    return target


def _copy(address: str, stream: Any, limit: int) -> None:
    opener = urllib.request.build_opener(_Redirects)
    try:
        with opener.open(address, timeout=TIMEOUT) as answer:
            promised = answer.headers.get("Content-Length")
            done = 0
            while piece := answer.read(CHUNK):
                done += len(piece)
                if done > limit:
                    raise ValueError(f"{address}: is larger than {limit} bytes: refused")
                stream.write(piece)
    except http.client.HTTPException as error:
        raise OSError(f"{address}: the connection broke ({error!r})") from error
    if promised is not None and promised.strip() != str(done):
        raise OSError(f"{address}: ended after {done} of {promised} bytes")


def _check_scheme(address: str) -> None:
    if urllib.parse.urlsplit(address).scheme not in SCHEMES:
        raise ValueError(f"{address}: only https is fetched")
