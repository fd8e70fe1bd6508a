"""Groups of near-duplicates: exactly the pairs within the distance, whatever their order; which picture stays; pictures
that only look alike to a hash."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
from PIL import Image, ImageDraw, ImageOps

from sana_pipe.data.cache.arrow import ipc_table
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.images.perceptual_hash import BITS, LENGTH, VIEW_WORDS, WORDS, flipped, hashes
from sana_pipe.data.snapshots import group_memory, near
from sana_pipe.data.snapshots.group_memory import GroupMemory

GRAY = 0x8080  # a word of colours
DISTANCE = near.DISTANCE


def random_hashes(count: int, seed: int = 0) -> np.ndarray:
    made = np.full((count, LENGTH), GRAY, np.uint16)
    made[:, :WORDS] = np.random.default_rng(seed).integers(0, 1 << 16, (count, WORDS), dtype=np.uint16)
    made[:, WORDS] = near.MIN_QUALITY
    return made


def changed(hashed: np.ndarray, bits: list[int]) -> np.ndarray:
    """A hash with some bits of its whole view inverted, and another inner view."""
    made = random_hashes(1, sum(bits) + len(bits))[0]
    made[:VIEW_WORDS] = hashed[:VIEW_WORDS]
    for bit in bits:
        made[bit // 16] ^= np.uint16(1 << bit % 16)
    return made


def reference(hashed: np.ndarray, distance: int) -> list[int]:
    """The smallest row of each group, by comparing all pairs."""
    whole, inner = hashed[:, :VIEW_WORDS], hashed[:, VIEW_WORDS:WORDS]
    pairs = np.zeros((len(hashed), len(hashed)), bool)
    for left in (whole, flipped(whole)):
        for right in (whole, inner):
            pairs |= np.bitwise_count(left[:, None] ^ right[None]).sum(axis=2) <= distance
    good = hashed[:, WORDS] >= near.MIN_QUALITY
    pairs = (pairs | pairs.T) & good[:, None] & good[None] | np.eye(len(hashed), dtype=bool)
    group = np.arange(len(hashed))
    while not np.array_equal(smaller := np.where(pairs, group[None], len(group)).min(axis=1), group):
        group = smaller
    return group.tolist()


def clusters(seed: int) -> np.ndarray:
    """Hashes with copies whose whole view differs in 0 to 24 bits, mirrored ones, and ones of the inner part."""
    rng = np.random.default_rng(seed)
    made = list(random_hashes(60, seed))
    for row in range(180):
        origin = made[rng.integers(len(made))]
        if rng.random() < 0.3:
            origin = np.concatenate([origin[VIEW_WORDS:WORDS], origin[:VIEW_WORDS], origin[WORDS:]])
        if rng.random() < 0.3:
            origin = flipped(origin)
        made.append(changed(origin, rng.permutation(128)[: rng.integers(25)].tolist()))
        made[-1][WORDS] -= row % 9 == 0
    return np.stack(made)


@pytest.mark.parametrize(("distance", "bits"), [(0, 4), (7, 4), (8, 9), (13, 6), (15, 1), (15, 9), (17, 4)])
def test_groups_are_those_of_all_pairs(distance: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "IN_RANGE", max(1, 480 >> bits))
    for name, value in {"ROWS": 7, "COLUMNS": 5, "DENSE": 30, "WAITING": 10}.items():
        monkeypatch.setattr(near, name, value)
    hashed = clusters(distance)
    assert near.groups(hashed, distance).tolist() == reference(hashed, distance)


@pytest.mark.parametrize("distance", [7, 13, 15, 16, 17, 20, 23])
def test_the_last_pairs_within_the_distance_are_found(distance: int) -> None:
    """Pairs that differ in exactly that many bits, spread evenly or in few places."""
    rng = np.random.default_rng(distance)
    hashed = random_hashes(800, distance)
    for row in range(400):
        likely = rng.dirichlet(np.full(16, rng.choice([0.2, 1, 100]))) + 1e-4
        bits = rng.choice(128, distance, replace=False, p=np.repeat(likely / likely.sum() / 8, 8))
        hashed[400 + row] = changed(hashed[row], np.roll(np.arange(128), rng.integers(128))[bits].tolist())
    assert near.groups(hashed, distance)[400:].tolist() == list(range(400))
    assert near.groups(hashed, distance - 1).tolist() == list(range(800))


@pytest.mark.parametrize("seed", range(6))
def test_what_is_known_is_not_compared_again_and_changes_no_group(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes come and go at random: groups with a memory are those of all pairs, whatever was there before."""
    monkeypatch.setattr(near, "IN_RANGE", 8)
    for name, value in {"ROWS": 7, "COLUMNS": 5, "DENSE": 30, "WAITING": 10}.items():
        monkeypatch.setattr(near, name, value)
    rng, hashed, memory = np.random.default_rng(seed), clusters(seed), GroupMemory(DISTANCE)
    there = rng.random(len(hashed)) < 0.5
    for _ in range(8):
        rows = rng.permutation(np.flatnonzero(there))
        assert near.groups(hashed[rows], DISTANCE, memory=memory).tolist() == reference(hashed[rows], DISTANCE)
        there ^= rng.random(len(hashed)) < rng.choice([0, 0.01, 0.05, 0.3])


@pytest.mark.parametrize("seed", range(3))
def test_hashes_that_come_one_at_a_time_give_the_groups_of_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most ranges of prefixes have no new hash then, and are not looked at."""
    monkeypatch.setattr(near, "IN_RANGE", 1)
    hashed, memory = clusters(seed), GroupMemory(DISTANCE)
    hashed = hashed[np.random.default_rng(seed).permutation(len(hashed))]
    for count in range(150, len(hashed) + 1):
        group = near.groups(hashed[:count], DISTANCE, memory=memory)
    assert group.tolist() == reference(hashed, DISTANCE)


def test_pairs_of_known_hashes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, memory, compared = clusters(1), GroupMemory(DISTANCE), 0
    plain = near.Search.compare

    def counted(search: Any, by: Any, of: Any, columns: Any, *rest: Any) -> None:
        nonlocal compared
        compared += len(of) * len(columns)
        plain(search, by, of, columns, *rest)

    monkeypatch.setattr(near.Search, "compare", counted)
    costs = []
    for rows in (slice(1, None), slice(1, None), slice(0, None)):
        compared = 0
        near.groups(hashed[rows], DISTANCE, memory=memory)
        costs.append(compared)
    assert costs[1] == 0 and 0 < costs[2] < costs[0] / 10


def test_groups_are_stored_and_unusable_ones_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_memory, "LEAST", 100)
    files, unique = Cache(tmp_path / "cache", create=True).files, clusters(2)[:, 1:]

    def known(distance: int = DISTANCE) -> bool:
        before = GroupMemory.read(files, distance).known(unique)
        assert (before >= 0).all() or (before < 0).all()
        return bool((before >= 0).all())

    def store() -> None:
        memory = GroupMemory.read(files, DISTANCE)
        memory.known(unique)
        memory.learn(np.arange(len(unique)) // 3 * 3)
        memory.write(files)

    assert not known()
    store()
    assert known() and not known(DISTANCE - 1)
    path = tmp_path / "cache" / group_memory.PATH
    whole = path.read_bytes()
    store()
    assert path.read_bytes() == whole
    stored = ipc_table(whole)
    for name in ("key", "group"):
        at = whole.index(stored.column(name).chunk(0).buffers()[-1])
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert not known()
    path.write_bytes(whole[:-100])
    assert not known()
    store()
    assert known()
    monkeypatch.setattr(group_memory, "LEAST", 1000)
    path.unlink()
    store()
    assert not path.exists(), "few hashes are compared in a moment"


def test_the_order_of_rows_changes_nothing() -> None:
    hashed = clusters(3)
    order = np.random.default_rng(0).permutation(len(hashed))
    here, there = near.groups(hashed, 13), near.groups(hashed[order], 13)
    assert {frozenset(order[there == group].tolist()) for group in there} == {
        frozenset(np.flatnonzero(here == group).tolist()) for group in here
    }
    assert 60 <= len(set(here.tolist())) < 200
    calls: list[tuple[int, int]] = []
    near.groups(hashed, 13, lambda *call: calls.append(call))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] and len(calls) > 10
    assert near.groups(hashed[:0], 13).tolist() == []
    assert near.groups(hashed[:1], 13).tolist() == [0]


@pytest.mark.parametrize("noise", [0, 2])
def test_many_copies_of_one_picture_take_linear_time(noise: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10^5 equal hashes; and 20,000 different ones of which all are near: few of their pairs are compared."""
    rng = np.random.default_rng(0)
    count = 20_000 if noise else 100_000
    hashed = np.repeat(random_hashes(1), count, axis=0)
    for _ in range(noise):
        hashed[np.arange(count), rng.integers(0, WORDS, count)] ^= (1 << rng.integers(0, 16, count)).astype(np.uint16)
    compared, xor = [], np.bitwise_xor

    def counted(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> np.ndarray:
        compared.append(out.size)
        return xor(first, second, out=out)

    monkeypatch.setattr(np, "bitwise_xor", counted)
    assert not near.groups(hashed, DISTANCE).any()
    assert sum(compared) < 5_000 * count


def gradient(rng: np.random.Generator) -> np.ndarray:
    y, x = np.mgrid[:256, :256]
    kind = rng.integers(3)
    if kind == 0:
        values = np.cos(angle := rng.uniform(0, 6.3)) * x + np.sin(angle) * y
    elif kind == 1:
        values = np.hypot(x - rng.integers(256), y - rng.integers(256))
    else:
        values = np.exp(-np.hypot(x - rng.integers(256), y - rng.integers(256)) / 100)
    values = (values - values.min()) / np.ptp(values)
    return (values[..., None] * rng.integers(60, 256, 3)).astype(np.uint8)


def scan(page: int) -> np.ndarray:
    """A page of a book in the same frame; each page has other lines."""
    rng = np.random.default_rng(page)
    picture = Image.new("RGB", (512, 512), (30, 30, 30))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((40, 24, 472, 488), (235, 230, 220))
    for line in range(26):
        if rng.random() < 0.85:
            words = " ".join("abcdefghijklmnop"[: rng.integers(2, 12)] for _ in range(rng.integers(2, 9)))
            draw.text((60, 40 + 17 * line), words[:62], (20, 20, 20))
    return np.asarray(picture)


def test_pictures_that_say_little_are_not_one_group() -> None:
    rng = np.random.default_rng(0)
    flat = [np.full((256, 256, 3), value, np.uint8) for value in (0, 0, 1, 128, 255)]
    gradients = [gradient(rng) for _ in range(300)]
    hashed = hashes(np.stack(flat + gradients))
    assert near.groups(hashed, DISTANCE).tolist() == list(range(len(hashed)))


def test_pages_in_the_same_frame_are_not_one_group() -> None:
    hashed = hashes(np.stack([scan(page) for page in range(60)]))
    assert hashed[:, WORDS].min() >= near.MIN_QUALITY
    assert near.groups(hashed, DISTANCE).tolist() == list(range(60))


def test_copies_of_photographs_are_groups() -> None:
    pictures = []
    for name in ("astronaut", "coffee", "rocket"):
        photograph = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
        width, height = photograph.size
        pictures += [
            photograph,
            photograph.resize((width // 2, height // 2)),
            photograph.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
            photograph.crop((width // 20, height // 20, width - width // 20, height - height // 20)),
        ]
    hashed = np.concatenate([hashes(np.asarray(picture.resize((256, 256)))[None]) for picture in pictures])
    assert near.groups(hashed, DISTANCE).tolist() == [0] * 4 + [4] * 4 + [8] * 4


def shirt(colour: str, ground: str = "white") -> Image.Image:
    picture = Image.new("RGB", (256, 256), ground)
    cut = [(60, 60), (100, 40), (156, 40), (196, 60), (220, 110), (190, 120), (180, 100), (180, 220), (76, 220)]
    draw = ImageDraw.Draw(picture)
    draw.polygon([*cut, (76, 100), (66, 120), (36, 110)], fill=colour)
    draw.ellipse((108, 30, 148, 60), fill=ground)
    return picture


def compressed(picture: Image.Image, quality: int) -> Image.Image:
    """The picture as a JPEG with chroma of half the size."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, subsampling=2)
    return Image.open(file)


@pytest.mark.parametrize("distance", [0, DISTANCE])
def test_the_same_shape_in_other_colours_is_another_picture(distance: int) -> None:
    colours = ["red", "green", "blue", "orange", "purple", "brown", "gray"]
    pictures = [shirt(colour) for colour in colours]
    hashed = hashes(np.stack([*map(np.asarray, pictures)]))
    assert near.groups(hashed, distance).tolist() == list(range(len(colours)))
    assert near.distances(hashed[0], hashed).tolist()[1:] == [BITS] * 6 and near.distances(hashed[0], hashed)[0] == 0


def test_copies_keep_their_colours() -> None:
    photograph = Image.fromarray(skimage.data.astronaut())
    for picture in (photograph, shirt("red"), shirt("blue").convert("L").convert("RGB")):
        values = np.asarray(picture.resize((256, 256)), float)
        copies = [
            values,
            compressed(picture, 50).resize((256, 256)),
            compressed(picture.resize((128, 128)), 60).resize((256, 256)),
            compressed(ImageOps.mirror(picture), 60).resize((256, 256)),
            values * 0.75,
            np.minimum(values * [1.03, 1, 0.97], 255),
        ]
        hashed = hashes(np.stack([np.asarray(copy).astype(np.uint8) for copy in copies]))
        hashed[:, WORDS] = near.MIN_QUALITY
        assert not near.groups(hashed, DISTANCE).any()
        assert not near.distances(hashed[0], hashed)[0] and (near.distances(hashed[0], hashed) <= DISTANCE).all()
    values = np.asarray(photograph)
    assert near.groups(hashes(np.stack([values, values[..., ::-1]])), DISTANCE).tolist() == [0, 1]
