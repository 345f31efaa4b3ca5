"""CRC32C, the checksum of TFRecord files, which no library computes that is installed anyway.

The polynomial is Castagnoli's (RFC 3720, appendix B.4); what TFRecord files store is rotated and shifted by a constant.
"""

from __future__ import annotations

import functools

import numpy as np

POLYNOMIAL = 0x82F63B78  # bits reversed
BLOCK = 1024  # bytes that are looked up at once


@functools.cache
def _table() -> np.ndarray:
    """What each byte adds to the checksum if so many bytes follow it: ``(BLOCK, 256)`` uint32."""
    table = np.empty((BLOCK, 256), np.uint32)
    table[0] = np.arange(256)
    for _ in range(8):
        table[0] = (table[0] >> 1) ^ np.where(table[0] & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    for behind in range(1, BLOCK):
        table[behind] = (table[behind - 1] >> 8) ^ table[0][table[behind - 1] & 255]
    return table


def crc32c(data: bytes) -> int:
    """The checksum of bytes, 32 bits."""
    state, table = 0xFFFFFFFF, _table()
    for begin in range(0, len(data), BLOCK):
        part = np.frombuffer(data, np.uint8, min(BLOCK, len(data) - begin), begin).copy()
        mixed = min(4, len(part))
        part[:mixed] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8, mixed)
        found = np.bitwise_xor.reduce(table[np.arange(len(part) - 1, -1, -1), part])
        state = int(found) ^ state >> 8 * mixed
    return state ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """The checksum as TFRecord files store it."""
    found = crc32c(data)
    return ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF
