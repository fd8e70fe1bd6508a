"""Storage of a record's values: from bf16 bits to the payload in a shard, and back (bytes: cache_layout.md).

`bf16`: the bits themselves, without this module. `bf16-zstd`, lossless: the exponents, which repeat, are compressed
with zstd level 1; sign and mantissa are stored as they are. `int8`, lossy: 8 bits per value, with one scale per token
after division by the rms of its channel in the record. A token is a row (of text), or a position of what has channels
(a latent); see `by_row`.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import numpy as np
import zstandard

from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.encodings import Encoding, encoding_class
from sana_pipe.data.cache.files import Files

PLAIN, LOSSLESS, INT8 = "bf16", "bf16-zstd", "int8"
STORAGES = (PLAIN, LOSSLESS, INT8)
LEVEL = 1
ZSTD = ".".join(str(part) for part in zstandard.ZSTD_VERSION)
"""Version of the zstd library: its output may differ between versions."""

_HEADER = struct.Struct("<4s4I")
_LOSSLESS, _INT8 = b"SPZ1", b"SPQ1"
_thread = threading.local()  # a zstd context belongs to one thread


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes the payloads of one encoding that is not stored as plain bf16. Safe for several threads.

    Attributes:
        by_row: whether a token is a row (rows, width) and not a position (channels, height, width).
        storage: `bf16-zstd` or `int8`.
    """

    by_row: bool
    storage: str

    def encode(self, bits: np.ndarray) -> bytes:
        """The payload of an array of bf16 bits (finite values)."""
        dimensions = (*bits.shape, 0, 0, 0)[:3]
        if self.storage == LOSSLESS:
            return _HEADER.pack(_LOSSLESS, bits.ndim, *dimensions) + _split(bits)
        tokens = tokens_of(to_float(bits), self.by_row)
        scales = channel_scales(tokens)
        steps, quantised = quantise(tokens, to_float(scales))
        parts = (scales.astype("<u2"), steps.astype("<u2"), _untokens(quantised, self.by_row))
        return _HEADER.pack(_INT8, bits.ndim, *dimensions) + b"".join(part.tobytes() for part in parts)

    def decode(self, payload: bytes | bytearray | memoryview, into: np.ndarray, where: str) -> None:
        """Write the bf16 bits of a verified payload into a C-contiguous uint16 array.

        Raises:
            IntegrityError: the payload has another storage or shape.
        """
        data = memoryview(payload)
        magic = _LOSSLESS if self.storage == LOSSLESS else _INT8
        dimensions = (*into.shape, 0, 0, 0)[:3]
        if bytes(data[: _HEADER.size]) != _HEADER.pack(magic, into.ndim, *dimensions):
            raise IntegrityError(
                f"{where} is not stored as {self.storage} of shape {into.shape}",
                expected=_HEADER.pack(magic, into.ndim, *dimensions).hex(),
                found=bytes(data[: _HEADER.size]).hex(),
            )
        data = data[_HEADER.size :]
        if self.storage == LOSSLESS:
            _join(data, into, where)
            return
        tokens, channels = _sizes(self.by_row, into.shape)
        begin = 2 * (channels + tokens)
        if len(data) != begin + into.size:
            raise IntegrityError(
                f"{where} does not have the length of int8 values of shape {into.shape}",
                expected=begin + into.size,
                found=len(data),
            )
        if into.size:
            scale = to_float(np.frombuffer(data, "<u2", channels))
            step = to_float(np.frombuffer(data, "<u2", tokens, 2 * channels))
            values = tokens_of(np.frombuffer(data, np.int8, into.size, begin).reshape(into.shape), self.by_row)
            values = values * step[:, None]
            values *= scale
            largest = 127.0 * float(step.max()) * float(scale.max())
            into[...] = _untokens(from_float(values, largest), self.by_row).reshape(into.shape)


def by_row(encoding: Encoding) -> bool:
    """Return whether a token is a row of its records; see `Codec`."""
    return encoding.axes[0] != "channels"


def codec_of(encoding: Encoding) -> Codec | None:
    """The codec of an encoding; None for plain bf16.

    Raises:
        CacheError: this version does not know its storage.
    """
    if encoding.storage not in STORAGES:
        raise CacheError(
            f"values are stored as {encoding.storage!r}, which this version does not know",
            expected=" or ".join(STORAGES),
            fix="use the version of sana-pipe that wrote it, or a newer one",
        )
    return None if encoding.storage == PLAIN else Codec(by_row(encoding), encoding.storage)


def reader(files: Files, encoding: str) -> Codec | None:
    """The codec of an encoding in the cache, by name. None for plain bf16, and if the encoding's document is missing:
    plain records are verified without it, all others then fail their check."""
    if not files.exists(layout.Paths.encoding(encoding)):
        return None
    body = files.document(layout.Paths.encoding(encoding))
    values = encoding_class(body["kind"]).from_values(body["values"])
    if values.name != encoding:
        raise IntegrityError(
            f"{files.where(layout.Paths.encoding(encoding))}: holds another encoding",
            expected=encoding,
            found=values.name,
        )
    return codec_of(values)


def payload_bytes(encoding: Encoding, shape: tuple[int, ...]) -> int:
    """Bytes of a payload; an estimate for `bf16-zstd`, which depends on the values (measured: 0.69 of bf16)."""
    size = int(np.prod(shape))
    if encoding.storage == PLAIN:
        return 2 * size
    if encoding.storage == LOSSLESS:
        return _HEADER.size + round(2 * size * 0.69)
    return _HEADER.size + 2 * sum(_sizes(by_row(encoding), shape)) + size


# ---------------------------------------------------------------- size and error


class Measured:
    """Adds up size and error of stored records."""

    def __init__(self) -> None:
        self.records = self.raw = self.stored = 0
        self._signal = self._noise = 0.0
        self.worst = 0.0

    def add(self, codec: Codec, bits: np.ndarray, payload: bytes) -> None:
        """Decode a new payload and compare it with the values.

        Raises:
            IntegrityError: a lossless payload does not decode to its values.
        """
        back = np.empty(bits.shape, np.uint16)
        codec.decode(payload, back, "a new record")
        if codec.storage == LOSSLESS and not np.array_equal(back, bits):
            raise IntegrityError(
                "a lossless record does not decode to what was encoded",
                fix="check the zstandard package, and the memory of this machine",
            )
        true = tokens_of(to_float(bits), codec.by_row).astype(np.float64)
        error = tokens_of(to_float(back), codec.by_row) - true
        signal, noise = (true * true).sum(axis=1), (error * error).sum(axis=1)
        nonzero = signal > 0
        self.worst = float(np.sqrt(noise[nonzero] / signal[nonzero]).max(initial=self.worst))
        self._signal += float(signal.sum())
        self._noise += float(noise.sum())
        self.records += 1
        self.raw += bits.nbytes
        self.stored += len(payload)

    @property
    def ratio(self) -> float:
        return self.stored / self.raw if self.raw else 1.0

    @property
    def error(self) -> float:
        """Relative rms error."""
        return float(np.sqrt(self._noise / self._signal)) if self._signal else 0.0

    def line(self, kind: str, storage: str) -> str:
        loss = (
            f"relative error {self.error:.5f} rms, {self.worst:.5f} in the worst token" if self._noise else "no error"
        )
        return f"{kind} storage {storage}: {self.ratio:.3f} of bf16's bytes, {loss} ({self.records} records measured)"


# ---------------------------------------------------------------- numbers


def to_float(bits: np.ndarray) -> np.ndarray:
    """float32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_float(values: np.ndarray, largest: float = np.inf) -> np.ndarray:
    """bf16 bits of finite float32 values, rounded to nearest even. A value that would round to infinity becomes the
    largest finite one.

    Args:
        largest: bound of the values; a small bound saves a pass.
    """
    wide = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = wide >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += wide
    rounded >>= np.uint32(16)
    bits = rounded.astype(np.uint16)
    if largest >= 2.0**127:
        over = (bits & 0x7F80) == 0x7F80
        bits[over] = (bits[over] & 0x8000) | 0x7F7F
    return bits


def tokens_of(values: np.ndarray, by_row: bool) -> np.ndarray:
    """(tokens, channels) of rows, or of (channels, height, width)."""
    return values if by_row else values.reshape(values.shape[0], -1).T


def _untokens(tokens: np.ndarray, by_row: bool) -> np.ndarray:
    return np.ascontiguousarray(tokens if by_row else tokens.T)


def _split(bits: np.ndarray) -> bytes:
    """Sign and mantissa, plain, and the exponents, compressed."""
    flat = np.ascontiguousarray(bits, "<u2").reshape(-1)
    mantissas = ((flat >> 8) & 0x80 | flat & 0x7F).astype(np.uint8)
    exponents = (flat >> 7 & 0xFF).astype(np.uint8)
    return mantissas.tobytes() + zstandard.ZstdCompressor(level=LEVEL).compress(exponents.tobytes())


def _join(data: memoryview, into: np.ndarray, where: str) -> None:
    count = into.size
    decompressor = getattr(_thread, "decompressor", None)
    if decompressor is None:
        decompressor = _thread.decompressor = zstandard.ZstdDecompressor()
    try:
        # zstandard allocates the size in the frame, whatever the limit is.
        size = zstandard.get_frame_parameters(data[count:]).content_size if len(data) > count else 0
        exponents = decompressor.decompress(data[count:], max_output_size=count) if size == count and count else b""
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{where}: its exponents cannot be decompressed: {error}") from None
    if size != count or len(exponents) != count:
        raise IntegrityError(f"{where}: has the wrong number of exponents", expected=count, found=size)
    bits = np.frombuffer(exponents, np.uint8).astype(np.uint16)
    bits <<= 7
    mantissas = np.frombuffer(data, np.uint8, count).astype(np.uint16)
    bits |= mantissas & 0x7F
    mantissas &= 0x80
    mantissas <<= 8
    np.bitwise_or(bits.reshape(into.shape), mantissas.reshape(into.shape), out=into)


def _sizes(by_row: bool, shape: tuple[int, ...]) -> tuple[int, int]:
    """Tokens and channels of a record."""
    rest = int(np.prod(shape[1:]))
    return (shape[0], rest) if by_row else (rest, shape[0])


def channel_scales(tokens: np.ndarray) -> np.ndarray:
    """The rms of each channel of (tokens, channels), as bf16 bits.

    A channel that is (nearly) zero gets 1/1024 of the mean. Otherwise its rounding errors would decide the step of a
    token. No scale is below 2^-100 or above 2^100.
    """
    rms = np.sqrt(np.square(tokens, dtype=np.float64).mean(axis=0)) if tokens.size else np.ones(tokens.shape[1])
    floor = max(float(rms.mean()) / 1024, 2.0**-100)
    return from_float(np.clip(rms, floor, 2.0**100).astype(np.float32))


def quantise(tokens: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps (bf16 bits, one per token) and int8 values of (tokens, channels), for channel scales (channels,)."""
    even = tokens / scale
    wide = (np.abs(even).max(axis=1, initial=0.0) / np.float32(127)).astype(np.float32).view(np.uint32)
    steps = ((wide + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)  # rounded up, so that no value is clipped
    step = to_float(steps)[:, None]
    quantised = np.divide(even, step, out=np.zeros_like(even), where=step > 0)
    return steps, np.clip(np.rint(quantised), -127, 127).astype(np.int8)
