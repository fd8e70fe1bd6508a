"""Which picture of equal ones stays, and whose captions it gets: columns against a plain reading, row by row."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sana_pipe.base import disk
from sana_pipe.data.cache import scratch
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.snapshots import frames, selection
from sana_pipe.data.snapshots.frames import Frame
from sana_pipe.data.snapshots.join import Joined
from tests.support.frames import SOURCES, frame_of

COLUMNS = ("source", "sample_id", "picture_id", "digest", "height", "width", "bucket", "cluster")


def expected(frame: Frame, order: list[str], earlier: set[int], lengths: np.ndarray | None, keeps: bool) -> list[Any]:
    """The rows that stay, with their captions as (text, weight)."""
    items, groups = frame.item.to_pylist(), dict[bytes, list[int]]()
    known = {int(p) for p, s in zip(frame.picture_id, frame.sample_id, strict=True) if int(s) in earlier}

    def captions(row: int) -> list[tuple[int, float]]:
        some = slice(frame.captions[row], frame.captions[row + 1])
        return list(zip(frame.text[some].tolist(), frame.weight[some].tolist(), strict=True))

    def merit(row: int) -> tuple[Any, ...]:
        source = SOURCES[frame.source[row]]
        size, longest = int(frame.height[row] * frame.width[row]), 0
        if lengths is not None:
            longest = max(int(lengths[text]) for text, _ in captions(row))
        larger = () if lengths is None else (-size, -longest)
        rank = order.index(source) if source in order else len(order)
        return int(frame.picture_id[row]) not in known, *larger, rank, source, items[row]

    for row, key in enumerate(frame.digest.tolist()):
        groups.setdefault(key, []).append(row)
    result = []
    for rows in groups.values():
        best = int(frame.picture_id[min(rows, key=merit)])
        lost = [each for row in rows if frame.picture_id[row] != best for each in captions(row)]
        for row in rows:
            if frame.picture_id[row] == best:
                own, texts = captions(row), {text for text, _ in captions(row)}
                for text, weight in lost if keeps else ():
                    if text not in texts:
                        own.append((text, weight))
                        texts.add(text)
                result.append((row, own))
    return sorted(result)


@pytest.mark.parametrize(
    ("by", "keeps", "small"), [("source", False, False), ("source", True, True), ("size", True, False)]
)
def test_the_picture_that_stays_and_its_captions_are_those_of_a_plain_reading(
    by: str, keeps: bool, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        monkeypatch.setattr(scratch, "LIMIT", 1 << 10)
        monkeypatch.setattr(scratch, "RUN", 48)
        monkeypatch.setattr(frames, "ROWS", 40)
    for seed, (pictures, texts) in enumerate([(0, 1), (1, 1), (99, 7), (99, 200)]):
        rng = np.random.default_rng(seed)
        frame, lengths = frame_of(rng, pictures, texts), rng.integers(1, 4, texts).astype(np.uint32)
        joined = Joined(list(SOURCES), scratch=Scratch(lambda: disk.temporary_in(tmp_path)))
        known = rng.permutation(frame.sample_id)[: len(frame) // 5]
        records: Any = SimpleNamespace(texts=SimpleNamespace(columns={"caption_length": lengths}))
        better = selection.larger(frame, records) if by == "size" else None
        made, _ = selection.deduplicated(
            joined, frame, ["b"], selection.Earlier(joined.scratch, [known]), None, better, keeps
        )
        wanted = expected(frame, ["b"], set(known.tolist()), lengths if by == "size" else None, keeps)
        rows = np.array([row for row, _ in wanted], np.int64)
        for name in COLUMNS:
            found, here = getattr(made, name), getattr(frame, name)
            assert found.dtype == here.dtype and np.array_equal(found, here[rows]), name
        assert made.item.to_pylist() == frame.item.take(pa.array(rows)).to_pylist()
        assert np.array_equal(made.pictures["latent"], rows)
        assert made.captions.tolist() == np.cumsum([0, *(len(captions) for _, captions in wanted)]).tolist()
        every = [each for _, captions in wanted for each in captions]
        assert list(zip(made.text.tolist(), made.weight.tolist(), strict=True)) == every
        assert (made.text.dtype, made.weight.dtype, made.captions.dtype) == (np.int64, np.float32, np.int64)
