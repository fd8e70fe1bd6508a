"""Storage of a record's values: from bf16 bits to the payload in a shard, and back.

`bf16`: the bits themselves, without this module. `bf16-zstd`, lossless: the exponents, which repeat, are compressed
with zstd level 1; sign and mantissa are stored as they are. `int8`, lossy: 8 bits per value, with one scale per token
after division by a fixed scale per channel.
Why: text is 85 % of a cache. Lossless takes 0.69 of the bytes, int8 half. A scale per token alone loses a third of the
signal in encoders with a few very large channels; dividing by a fixed scale per channel first costs nothing and keeps
the error below one per cent (reference measurements).
Price: decoding costs CPU on every read (lossless: several times the plain read). The output of zstd may differ between
its versions: equal values, other bytes; a repair on another machine may then end in a new plan.

The payload begins with a header of 20 bytes: a magic, the number of dimensions, three dimensions (u32; 0 where unused).
  SPZ1 (bf16-zstd): n bytes `sign << 7 | mantissa`, then one zstd frame of n bytes of exponents.
  SPQ1 (int8): 16 bytes digest of the channel scales, one bf16 scale per token, then n int8 in the array's order.
A token is a row of text, or a position of a latent; a channel is a column of text, or a channel of a latent.

The channel scales of a recipe are measured once, rounded to bf16 (so that the order of a sum does not show), and
published as a content-addressed table that `scales/<recipe>.json` names. All workers use the first document. Each
record names its table, too, so that it is never decoded with another.
"""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import zstandard

from pipeline.cache import layout
from pipeline.cache.files import Files
from pipeline.errors import CacheError, IntegrityError

PLAIN, LOSSLESS, INT8 = "bf16", "bf16-zstd", "int8"
STORAGES = (PLAIN, LOSSLESS, INT8)
LEVEL = 1
ZSTD = ".".join(str(part) for part in zstandard.ZSTD_VERSION)
"""Version of the zstd library: its output may differ between versions."""

_HEADER = struct.Struct("<4s4I")
_LOSSLESS, _INT8 = b"SPZ1", b"SPQ1"
_DIGEST = 16
_thread = threading.local()  # a zstd context belongs to one thread


@dataclass(frozen=True)
class Scale:
    """One positive number per channel (float32), and the digest that names its table."""

    digest: str
    values: np.ndarray


class Codec:
    """Encodes and decodes the payloads of one recipe that is not stored as plain bf16. Safe for several threads.

    Args:
        files: the cache, where channel scales lie.
        kind: `latent` or `text`.
        storage: `bf16-zstd` or `int8`.
        scale: for `encode` (int8); `decode` uses the scales that each record names.

    Raises:
        CacheError: a storage that this version does not know.
    """

    def __init__(self, files: Files, kind: str, storage: str, scale: Scale | None = None):
        check_storage(storage)
        self.files, self.kind, self.storage, self.scale = files, kind, storage, scale
        self._scales: dict[str, np.ndarray] = {} if scale is None else {scale.digest: scale.values}

    def encode(self, bits: np.ndarray) -> bytes:
        """The payload of an array of bf16 bits (finite values)."""
        dimensions = (*bits.shape, 0, 0, 0)[:3]
        if self.storage == LOSSLESS:
            return _HEADER.pack(_LOSSLESS, bits.ndim, *dimensions) + _split(bits)
        if self.scale is None:
            raise CacheError("int8 storage needs channel scales, and none have been measured", fix="sana-pipe encode")
        head = _HEADER.pack(_INT8, bits.ndim, *dimensions) + bytes.fromhex(self.scale.digest)
        steps, quantised = quantise(tokens_of(to_float(bits), self.kind), self.scale.values)
        return head + steps.astype("<u2").tobytes() + _untokens(quantised, self.kind).tobytes()

    def decode(self, payload: bytes | bytearray | memoryview, into: np.ndarray, where: str) -> None:
        """Write the bf16 bits of a verified payload into a C-contiguous uint16 array.

        Raises:
            IntegrityError: the payload has another storage or shape, or its scales are missing.
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
        count = into.shape[0] if self.kind == "text" else into.size // max(1, into.shape[0])
        if len(data) != _DIGEST + 2 * count + into.size:
            raise IntegrityError(
                f"{where} has another length than int8 of shape {into.shape}",
                expected=_DIGEST + 2 * count + into.size,
                found=len(data),
            )
        scale = self._scale(bytes(data[:_DIGEST]).hex(), where)
        steps = np.frombuffer(data, "<u2", count, _DIGEST)
        quantised = np.frombuffer(data, np.int8, into.size, _DIGEST + 2 * count).reshape(into.shape)
        if into.size:
            values = tokens_of(quantised, self.kind) * to_float(steps)[:, None]
            if values.shape[1] != len(scale):
                raise IntegrityError(
                    f"{where} and its channel scales do not fit", expected=values.shape[1], found=len(scale)
                )
            values *= scale
            largest = 127.0 * float(to_float(steps).max()) * float(scale.max())
            into[...] = _untokens(from_float(values, largest), self.kind).reshape(into.shape)

    def _scale(self, digest: str, where: str) -> np.ndarray:
        scale = self._scales.get(digest)
        if scale is None:
            try:
                scale = self._scales[digest] = load_scale(self.files, digest)
            except IntegrityError as error:
                raise IntegrityError(f"{where}: its channel scales: {error.what}", fix="restore that file") from None
        return scale


def check_storage(storage: str) -> None:
    """Refuse a storage that this version cannot read.

    Raises:
        CacheError: with the names that it can.
    """
    if storage not in STORAGES:
        raise CacheError(
            f"values are stored as {storage!r}, which this version does not know",
            expected=" or ".join(STORAGES),
            fix="use the version of sana-pipe that wrote it, or a newer one",
        )


def writer(files: Files, recipe: layout.Recipe) -> Codec | None:
    """The codec for new records of a recipe; None for plain bf16.

    Raises:
        CacheError: int8, and no channel scales have been measured.
    """
    storage = storage_of(recipe)
    if storage == PLAIN:
        return None
    scale = find_scale(files, recipe.name) if storage == INT8 else None
    if storage == INT8 and scale is None:
        raise CacheError(f"{recipe.name}: its channel scales have not been measured", fix="sana-pipe encode --data DIR")
    return Codec(files, recipe.kind, storage, scale)


def reader(files: Files, recipe: str) -> Codec | None:
    """The codec of a recipe in the cache, by name. None for plain bf16, and if the recipe's document is missing: plain
    records are verified without it, all others then fail their check."""
    if not files.exists(layout.Paths.recipe(recipe)):
        return None
    body = files.document(layout.Paths.recipe(recipe))
    values = layout.RECIPES[body["kind"]].from_values(body["values"])
    if values.name != recipe:
        raise IntegrityError(
            f"{files.where(layout.Paths.recipe(recipe))}: holds another recipe", expected=recipe, found=values.name
        )
    storage = storage_of(values)
    return None if storage == PLAIN else Codec(files, values.kind, storage)


def payload_bytes(storage: str, kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a payload; an estimate for `bf16-zstd`, which depends on the values (measured: 0.69 of bf16)."""
    check_storage(storage)
    size = int(np.prod(shape))
    if storage == PLAIN:
        return 2 * size
    if storage == LOSSLESS:
        return _HEADER.size + round(2 * size * 0.69)
    tokens = shape[0] if kind == "text" else size // max(1, shape[0])
    return _HEADER.size + _DIGEST + 2 * tokens + size


def storage_of(recipe: layout.Recipe) -> str:
    storage = str(recipe.values()["storage"])
    check_storage(storage)
    return storage


# ---------------------------------------------------------------- channel scales


def measure_scale(arrays: Iterable[np.ndarray], kind: str) -> np.ndarray:
    """Channel scales of a calibration set (arrays of bf16 bits): each channel's rms, rounded to bf16.

    A channel that is (nearly) zero in the set gets 1/1024 of the mean scale. Otherwise a large value later on would
    take all the precision of its token. No scale is below 2^-100 or above 2^100.
    """
    total, count = np.zeros(0), 0
    for bits in arrays:
        tokens = tokens_of(to_float(bits), kind).astype(np.float64)
        squares = (tokens * tokens).sum(axis=0)
        total = squares if not count else total + squares
        count += len(tokens)
    if not count:
        raise ValueError("no values to measure")
    rms = np.sqrt(total / count)
    mean = float(rms.mean())
    if mean == 0.0:
        return np.ones(len(rms), np.float32)
    return to_float(from_float(np.clip(rms, max(mean / 1024, 2.0**-100), 2.0**100).astype(np.float32)))


def publish_scale(files: Files, recipe: str, values: np.ndarray, records: int) -> Scale:
    """Publish the channel scales of a recipe. If another worker was first, its scales are returned."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(values, "<f4"), version=(1, 0))
    digest = files.put_content(buffer.getvalue(), "tables", "npy", twice=True)
    files.put(layout.Paths.scale(recipe), layout.seal({"recipe": recipe, "table": digest, "records": records}))
    scale = find_scale(files, recipe)
    assert scale is not None
    return scale


def find_scale(files: Files, recipe: str) -> Scale | None:
    """The channel scales for new records of a recipe; None before they are measured."""
    name = layout.Paths.scale(recipe)
    if not files.exists(name):
        return None
    body = files.document(name)
    if body["recipe"] != recipe:
        raise IntegrityError(f"{files.where(name)}: belongs to another recipe", expected=recipe, found=body["recipe"])
    return Scale(body["table"], load_scale(files, body["table"]))


def scale_named(payload: bytes | bytearray) -> str:
    """Hex digest of the channel scales of an int8 payload."""
    return bytes(payload[_HEADER.size : _HEADER.size + 16]).hex()


def load_scale(files: Files, digest: str) -> np.ndarray:
    """Channel scales by the digest of their table.

    Raises:
        IntegrityError: missing, damaged or no such table.
    """
    name = layout.Paths.table(digest, "npy")
    data = io.BytesIO(files.content(name, digest))
    try:
        values = np.lib.format.read_array(data, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python
        raise IntegrityError(f"{files.where(name)}: is no table of channel scales: {error}") from None
    if values.dtype != np.float32 or values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
        raise IntegrityError(f"{files.where(name)}: is no table of channel scales")
    return values


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
            raise IntegrityError("a lossless record does not decode to what was encoded", fix="check zstandard and RAM")
        true = tokens_of(to_float(bits), codec.kind).astype(np.float64)
        error = tokens_of(to_float(back), codec.kind) - true
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


def tokens_of(values: np.ndarray, kind: str) -> np.ndarray:
    """(tokens, channels) of text rows, or of a latent (channels, height, width)."""
    return values if kind == "text" else values.reshape(values.shape[0], -1).T


def _untokens(tokens: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(tokens if kind == "text" else tokens.T)


def _split(bits: np.ndarray) -> bytes:
    """Sign and mantissa, plain, and the exponents, compressed."""
    flat = np.ascontiguousarray(bits, "<u2").reshape(-1)
    mantissas = ((flat >> 8) & 0x80 | flat & 0x7F).astype(np.uint8)
    exponents = (flat >> 7 & 0xFF).astype(np.uint8)
    compressor = getattr(_thread, "compressor", None)
    if compressor is None:
        compressor = _thread.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    return mantissas.tobytes() + compressor.compress(exponents.tobytes())


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
        raise IntegrityError(f"{where}: holds another number of exponents", expected=count, found=size)
    bits = np.frombuffer(exponents, np.uint8).astype(np.uint16)
    bits <<= 7
    mantissas = np.frombuffer(data, np.uint8, count).astype(np.uint16)
    bits |= mantissas & 0x7F
    mantissas &= 0x80
    mantissas <<= 8
    np.bitwise_or(bits.reshape(into.shape), mantissas.reshape(into.shape), out=into)


def quantise(tokens: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps (bf16 bits, one per token) and int8 values of (tokens, channels)."""
    if tokens.shape[1] != len(scale):
        raise CacheError("values and channel scales do not fit", expected=tokens.shape[1], found=len(scale))
    with np.errstate(over="ignore"):  # an overflow is refused below
        even = tokens / scale
    wide = (np.abs(even).max(axis=1, initial=0.0) / np.float32(127)).astype(np.float32).view(np.uint32)
    steps = ((wide + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)  # rounded up, so that no value is clipped
    if np.any((steps & 0x7F80) == 0x7F80):
        raise IntegrityError("a value is too far above its channel's scale for int8", fix="encode.storage=bf16-zstd")
    step = to_float(steps)[:, None]
    quantised = np.divide(even, step, out=np.zeros_like(even), where=step > 0)
    return steps, np.clip(np.rint(quantised), -127, 127).astype(np.int8)
