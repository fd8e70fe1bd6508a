"""A cache and a checkpoint that were written earlier: same identities, same batches, same losses.

`data/golden.tar.xz` holds a cache of two sources (`synthetic.add`) with three plain snapshots and a packed one, and the
checkpoint of four training steps. `figures.json` holds what was made of them then: snapshot ids, a digest of every
batch of 40 steps, the losses of steps 5 to 8. `tests/support/golden.py` records both anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.pack
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.snapshots import making
from tests.support import synthetic
from tests.support.golden import GOLDEN, PAD, SETTINGS, batch_digests, config, losses_after
from tests.support.trees import unpack

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(making, "PAD_TEXT_MULTIPLE", PAD)
    unpack(GOLDEN, tmp_path)
    return tmp_path


@pytest.fixture
def figures(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "figures.json").read_text())


@pytest.mark.parametrize("snapshot", [*SETTINGS, "packed"])
def test_an_earlier_snapshot_gives_the_same_batches(golden: Path, figures: dict[str, Any], snapshot: str) -> None:
    assert batch_digests(golden / "cache", snapshot) == figures["orders"][snapshot]


def test_an_earlier_cache_gives_the_same_snapshots(golden: Path, figures: dict[str, Any]) -> None:
    snapshots = figures["snapshots"]
    for name, overrides in SETTINGS.items():
        assert sana_pipe.stages.bucket.run(config(golden, *overrides), name=name) == snapshots[name]
    assert sana_pipe.stages.pack.run(config(golden, "bucket.pack_mib=1"), "plain", "packed") == snapshots["packed"]


def test_new_snapshots_of_an_earlier_cache(golden: Path, figures: dict[str, Any]) -> None:
    """They are the same everywhere."""
    for folder in ("snapshots", "names"):
        shutil.rmtree(golden / "cache" / folder)
        shutil.rmtree(golden / "cache" / "copies" / folder)
    made = {
        name: sana_pipe.stages.bucket.run(config(golden, *overrides), name=name) for name, overrides in SETTINGS.items()
    }
    made["packed"] = str(sana_pipe.stages.pack.run(config(golden, "bucket.pack_mib=1"), "plain", "packed"))
    assert made == figures["snapshots"]


def test_an_earlier_cache_is_continued(golden: Path) -> None:
    of, cache = config(golden), Cache(golden / "cache")
    before = cache.open_snapshot(sana_pipe.stages.bucket.run(of))
    encodings = (synthetic.LATENT, synthetic.text_encoding(of))
    for source in cache.sources():
        last = cache.last_scan(source)
        assert last is not None
        scan = cache.table(last["table"])
        images = planning.image_work(scan, source, synthetic.LATENT, synthetic.TABLE)
        captions = planning.caption_work(scan, encodings[1])
        plans = [len(cache.plans(encoding.name)) for encoding in encodings]
        assert len(planning.plan_images(cache, encodings[0], images, of.encode)) == plans[0], "there is nothing to do"
        assert len(planning.plan_captions(cache, encodings[1], captions, of.encode)) == plans[1]
    new = synthetic.pictures(30, "new-")
    rows = pa.Table.from_pylist(
        [{"item": p.item, "digest": layout.digest(p.content), "height": 24, "width": 24} for p in new], schema=SCAN
    )
    more = planning.image_work(pa.concat_tables([rows, rows]), "new", synthetic.LATENT, synthetic.TABLE)
    plan = planning.plan_images(cache, synthetic.LATENT, pa.concat_tables([images, more]), of.encode)[-1]
    assert sorted(cache.table(plan.table).column("item").to_pylist()) == sorted(p.item for p in new)
    synthetic.add(of, "new", new)
    after = Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of))
    ids = {sample for some in before.sample_ids() for sample in some.tolist()}
    grown = {sample for some in after.sample_ids() for sample in some.tolist()}
    assert ids < grown and len(grown - ids) == len(new)
    reader = after.reader("latent")
    for row in range(len(after)):
        sample = after.sample(row)
        place = sample.pictures["latent"]
        into = np.empty(after.shape("latent", sample.bucket), np.uint16)
        reader.read(
            place.shard,
            place.offset,
            place.key,
            place.checksum,
            into,
        )


def test_an_earlier_checkpoint_goes_on_as_it_did(golden: Path, figures: dict[str, Any]) -> None:
    assert losses_after(golden, 4) == pytest.approx(figures["losses"], rel=1e-5)
