"""The golden cache and checkpoint. `python -m tests.support.golden` records the cache anew when its format has changed;
the orders of its snapshots must stay, and so do the checkpoint and its losses."""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden.tar.xz"


def record() -> None:
    import stages.bucket
    import stages.pack
    from tests.support import synthetic
    from tests.support.trees import unpack
    from tests.test_golden import SETTINGS, batch_digests, config

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(GOLDEN, folder)
        figures = json.loads((folder / "figures.json").read_text())
        shutil.rmtree(folder / "cache")
        synthetic.add(config(folder), "photos", synthetic.pictures(60))
        synthetic.add(config(folder), "more", synthetic.pictures(30, "more"))
        made = {name: stages.bucket.run(config(folder, *options), name=name) for name, options in SETTINGS.items()}
        made["packed"] = str(stages.pack.run(config(folder, "bucket.pack_mib=1"), "plain", "packed"))
        orders = {name: batch_digests(folder / "cache", name) for name in made}
        assert all(orders[name] == figures["orders"][name] for name in SETTINGS), "another order"
        figures |= {"snapshots": made, "orders": orders}
        (folder / "figures.json").write_text(json.dumps(figures, indent=1))
        shutil.rmtree(folder / "cache" / "tmp", ignore_errors=True)
        with tarfile.open(GOLDEN, "w:xz") as tar:
            for name in ("cache", "figures.json", "run"):
                tar.add(folder / name, name)


if __name__ == "__main__":
    record()
