"""Random chains of everything that happens to a cache, against a dict.

`Chain` is a hypothesis state machine. Each rule runs real stages in a forked process (so that a kill is a kill: no
`finally`, no exit function) on a cache of a handful of small pictures, real models included. The model is a plain dict
of pictures and captions, with the samples of each name. What must hold:

* a command ends with a documented exit code, never with a traceback;
* what a named snapshot needs is there, or `verify` reports it;
* a record that is there is not encoded again;
* repair, encode and bucket always lead back to a cache without findings, whose snapshot holds just the dict.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from PIL import Image, ImageDraw

from sana_pipe.base.errors import IntegrityError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.signals.text import TextEncoding
from tests.support.constants import set_constants, unit_sizes
from tests.support.dying import dying, forked

KILLED = -int(signal.SIGKILL)
SIZES = ((64, 64), (80, 48))
WORDS = ("a red ball", "a blue boat on the sea", "Two  dogs")

KINDS, NOUNS = ("latent", "phash", "text"), ("images", "hashes", "captions")
NAMES = st.sampled_from("abcdef")
DAMAGE = ("flip", "cut", "lose", "swap")
OTHERS = {"y", "z"}
"""The pictures of another cache."""
DERIVED = {"claims", "fragments", "reports", "tmp"}
"""Folders whose files mean nothing to any reader."""


def replace(path: Path, data: bytes) -> None:
    """Other bytes under a name, in a file of its own: the old one may have links."""
    path.unlink()
    path.write_bytes(data)


def read_sample(snapshot: Snapshot, row: int) -> None:
    """Read and verify everything that training reads of a sample."""
    sample, bucket = snapshot.sample(row), snapshot.buckets[snapshot.sample(row).bucket]
    for kind, place in sample.pictures.items():
        into = np.empty(snapshot.pictures[kind].shape(bucket.height, bucket.width), np.uint16)
        snapshot.reader(kind).read(place.shard, place.offset, place.key, place.checksum, into, place.length)
    width = snapshot.encoding(TextEncoding).width
    text = snapshot.reader("text")
    for caption in sample.captions:
        rows = np.empty((caption.rows, width), np.uint16)
        text.read(caption.shard, caption.offset, caption.key, caption.checksum, rows, caption.length)
    snapshot.captions(row, text)


class Chain(RuleBasedStateMachine):
    """See the module. `make_config` is set by the test."""

    make_config: Callable[..., Config]
    other: str
    """A cache that holds `OTHERS`."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chain-"))
        self.pictures = self.folder / "pictures"
        self.pictures.mkdir()
        self.config = self.make_config(
            self.folder,
            "bucket.batch=1",
            "text.mode=exact",
            "data.decoder=pillow",
            "encode.max_shrink=1",
            "encode.signals=[phash]",
        )
        self.model: dict[str, tuple[int, int, str]] = {}
        self.named: dict[str, set[str]] = {}
        self.damaged = self.adopted = False
        self.stopped: set[str] = set()
        self.put_picture("a", 0, 0, WORDS[0])
        self.encode()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------ what a user does

    @rule(name=NAMES, seed=st.integers(0, 5), size=st.sampled_from((0, 1)), words=st.sampled_from(WORDS))
    def put_picture(self, name: str, seed: int, size: int, words: str) -> None:
        """A new picture, another one under its name, or another caption."""
        picture = Image.new("RGB", SIZES[size], (40 * seed, 255 - 40 * seed, 90))
        ImageDraw.Draw(picture).ellipse((8, 8, 20 + 4 * seed, 30), fill=(255, 255, seed))
        picture.save(self.pictures / f"{name}.png")
        (self.pictures / f"{name}.txt").write_text(words)
        stamp = 1_700_000_000 + crc32(f"{seed} {size} {words}".encode()) % 1_000_000  # another content, another time
        for suffix in ("png", "txt"):
            os.utime(self.pictures / f"{name}.{suffix}", (stamp, stamp))
        self.model[name] = (seed, size, words)

    @rule(name=NAMES)
    @precondition(lambda self: len(self.model) > 1)
    def remove_picture(self, name: str) -> None:
        if name in self.model and len(self.model) > 1:
            del self.model[name]
            for suffix in ("png", "txt"):
                (self.pictures / f"{name}.{suffix}").unlink()

    def _encode(self) -> Any:
        import sana_pipe.stages.encode

        return sana_pipe.stages.encode.run(self.config, data=str(self.pictures))

    def _records(self) -> int:
        cache = Cache(self.config.cache)
        return sum(len(cache.index(encoding.name)) for kind in KINDS for encoding in cache.encodings(kind))

    def _readable_records(self) -> int:
        """Records whose shards are there."""
        if self.damaged:
            return 0
        cache = Cache(self.config.cache)
        result = [cache.index(encoding.name) for kind in KINDS for encoding in cache.encodings(kind)]
        return sum(int((~index.lost[index.columns["shard"]]).sum()) for index in result)

    @rule()
    def encode(self) -> None:
        before = 0 if self.damaged or not (self.folder / "cache").exists() else self._records()
        code, value = forked(self._encode)
        self._documented(code, value)
        if code == 0 and not self.damaged:
            made = sum(value.get(noun, 0) for noun in NOUNS)
            assert made <= self._records() - before, "something was encoded twice"
            assert not any(forked(self._encode)[1].get(noun) for noun in NOUNS), "a second run encoded again"
            self.stopped.discard("encode")

    @rule(signals=st.sampled_from(([], ["phash"])))
    def ask_for(self, signals: list[str]) -> None:
        """Records of hashes are asked for, or no longer."""
        encode = self.config.encode.model_copy(update={"signals": signals})
        self.config = self.config.model_copy(update={"encode": encode})

    @rule(at=st.integers(0, 30), before=st.booleans())
    def encode_that_dies(self, at: int, before: bool) -> None:
        self._dies(self._encode, at, before)

    @rule(at=st.integers(0, 30), before=st.booleans())
    def encode_by_two(self, at: int, before: bool) -> None:
        """Two workers at once; one of them dies."""
        worker = os.fork()
        if not worker:
            os._exit(forked(self._encode)[0] & 0xFF)
        self._dies(self._encode, at, before)
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        assert self.damaged or code in (0, 1), f"the worker that lived ended with {code}"

    @rule(name=st.sampled_from((None, "r1", "r2")), at=st.integers(0, 60), before=st.booleans())
    def bucket(self, name: str | None, at: int, before: bool) -> None:
        self._bucket(name, lambda work: dying(work, at, before))

    def _bucket(
        self,
        name: str | None,
        how: Callable[[Callable[[], Any]], Callable[[], Any]],
        caches: Sequence[str] = (),
    ) -> str | None:
        import sana_pipe.stages.bucket

        name = None if name in self.named else name
        config = self._with_caches(caches)
        code, value = forked(how(lambda: sana_pipe.stages.bucket.run(config, name=name)))
        self._documented(code, value)
        if code == 0 and name is not None:
            self.named[name] = self._samples(value) if not self.damaged else set()
        elif code == KILLED and name is not None:
            self.named.pop(name, None)
        return value if code == 0 else None

    def _with_caches(self, caches: Sequence[str]) -> Config:
        bucket = self.config.bucket.model_copy(update={"caches": list(caches)})
        return self.config.model_copy(update={"bucket": bucket})

    @rule(name=st.sampled_from((None, "r1", "r2")), at=st.integers(0, 60), before=st.booleans())
    def adopt(self, name: str | None, at: int, before: bool) -> None:
        """A snapshot with the pictures of another cache, whose shards are linked."""
        self.adopted = True
        made = self._bucket(name, lambda work: dying(work, at, before), [self.other])
        (self.stopped.add if made is None else self.stopped.discard)("adopt")
        assert made is None or self.damaged or self._samples(made) >= OTHERS

    @rule(name=st.sampled_from(("r1", "r2", "latest")), at=st.integers(0, 4), before=st.booleans())
    def unname(self, name: str, at: int, before: bool) -> None:
        import sana_pipe.stages.forget

        code, value = forked(dying(lambda: sana_pipe.stages.forget.run(self.config, snapshot=name), at, before))
        assert code in (0, 1, 2, 3, 4, 5, KILLED), f"exit code {code}: {value}"
        assert name != "latest" or code not in (0, KILLED), "latest was forgotten"
        assert self.damaged or name not in self.named or code in (0, KILLED), value
        if code in (0, KILLED):
            self.named.pop(name, None)

    @rule(at=st.integers(0, 20), before=st.booleans())
    def repair_that_dies(self, at: int, before: bool) -> None:
        import sana_pipe.stages.verify

        self._dies(lambda: sana_pipe.stages.verify.run(self.config, repair=True), at, before)

    @rule(at=st.integers(0, 20), before=st.booleans())
    def pack(self, at: int, before: bool) -> None:
        import sana_pipe.stages.pack

        code, value = forked(dying(lambda: sana_pipe.stages.pack.run(self.config, name="packed"), at, before))
        self._documented(code, value)

    @rule(at=st.integers(0, 20), before=st.booleans())
    def gc(self, at: int, before: bool) -> None:
        """It refuses while there are shards of work that was stopped."""
        import sana_pipe.stages.gc

        records = self._readable_records()
        code, value = forked(
            dying(lambda: sana_pipe.stages.gc.run(self.config, yes=True, older_than_hours=0), at, before)
        )
        unfinished = code == IntegrityError.exit_code and ("is in no plan" in value or "is not committed" in value)
        if not (self.stopped and unfinished):
            self._documented(code, value)
        assert self.damaged or self._readable_records() == records, "gc removed shards that commits name"

    @rule()
    def keep(self) -> None:
        """What `train` does with the newest snapshot before it begins; its checkpoints need it from then on."""

        def work() -> str:
            cache = Cache(self.config.cache)
            snapshot = cache.open_snapshot()
            cache.keep(snapshot.id)
            return snapshot.id

        code, value = forked(work)
        self._documented(code, value)
        if code == 0:
            self.named[f"trained-{value[:16]}"] = set() if self.damaged else self._samples(value)

    @rule()
    def status(self) -> None:
        import sana_pipe.stages.status

        self._documented(*forked(lambda: sana_pipe.stages.status.run(self.config)))

    # ------------------------------------------------------------ what happens to disks

    @rule(
        how=st.sampled_from(DAMAGE), which=st.integers(0, 10_000), where=st.integers(0, 10_000), luck=st.integers(0, 2)
    )
    def damage(self, how: str, which: int, where: int, luck: int) -> None:
        """One file is no longer what was written; seldom, since much is not asserted of a damaged cache. A further
        one before the way back is a shard: of documents there are two copies."""
        if luck:
            return
        cache = self.folder / "cache"
        kinds = {"shards"} if self.damaged else {path.name for path in cache.iterdir()} - DERIVED
        files = sorted(p for p in cache.rglob("*") if p.is_file() and p.relative_to(cache).parts[0] in kinds)
        if not files:
            return
        path, other = files[which % len(files)], files[where % len(files)]
        data = path.read_bytes()
        if how == "lose":
            path.unlink()
        elif how == "cut":
            replace(path, data[: where % max(1, len(data))])
        elif how == "flip" and data:
            at = where % len(data)
            replace(path, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif how == "swap":
            replace(path, other.read_bytes())
            replace(other, data)
        self.damaged = True

    # ------------------------------------------------------------ what must hold

    @rule()
    def come_back(self) -> None:
        """Repair, encode, bucket: the way back from everything."""
        import sana_pipe.stages.verify

        config = self._with_caches([self.other] if self.adopted else [])  # as the error of a repair says

        def verify(repair: bool) -> tuple[int, Any]:
            return forked(lambda: sana_pipe.stages.verify.run(config, repair=repair))

        was = self.damaged
        for _ in range(3):
            code, value = verify(True)
            if "adopt" in self.stopped and code == IntegrityError.exit_code and not self.damaged:
                self._only_shards_without_a_plan()
            else:
                self._documented(code, value)
            self._documented(*forked(self._encode))
            self.damaged = True  # so that nothing is asserted of the way
            if self.adopted:  # the other cache has what this one cannot encode again
                self._bucket(None, lambda work: work, [self.other])
            made = self._bucket(None, lambda work: work)
            code, value = verify(False)
            if code == 0:
                break
        assert code == 0, f"verify ended with {code} after a repair: {value}\n{self._findings()}"
        assert made is not None
        assert self._samples(made) == set(self.model), "the snapshot holds other samples than the folder"
        self.damaged = False
        self.stopped.clear()
        for name, samples in self.named.items():
            pointed = Cache(self.config.cache).snapshot_of(name)
            assert pointed is not None, f"the name {name} is lost"
            assert not samples or self._samples(pointed) == samples
        if not was:
            assert not any(forked(self._encode)[1].get(noun) for noun in NOUNS)

    @rule()
    @precondition(lambda self: self.damaged)
    def come_back_soon(self) -> None:
        self.come_back()

    @invariant()
    def named_snapshots_are_whole_or_reported(self) -> None:
        if not hasattr(self, "config") or not (self.folder / "cache" / "names").exists():
            return
        import sana_pipe.stages.verify

        def readable() -> int:
            cache = Cache(self.config.cache)
            for name in cache.snapshot_names():
                snapshot = cache.open_snapshot(name)
                for row in range(sum(bucket.samples for bucket in snapshot.buckets)):
                    read_sample(snapshot, row)
            return 0

        if forked(readable)[0] != 0:
            assert self.damaged, "a named snapshot cannot be read, though nothing was damaged"
            assert forked(lambda: sana_pipe.stages.verify.run(self.config))[0] != 0, "verify says nothing of it"

    def _only_shards_without_a_plan(self) -> None:
        """Check that `verify` names nothing but shards of a killed adoption, which come before their plan."""
        from sana_pipe.data.cache import audit

        code, found = forked(lambda: [f.problem for f in audit.verify(Cache(self.config.cache), lambda _: None)])
        assert code == 0 and found and all("is in no plan" in problem for problem in found), found

    def _documented(self, code: int, value: Any) -> None:
        assert code in (0, 1, 2, 3, 4, 5, KILLED), f"exit code {code}: {value}"
        accepted = self.damaged or self._nameless() or code not in (3, 4)
        assert accepted or not self.model or "no snapshot" in str(value), value

    def _nameless(self) -> bool:
        """Whether the first `bucket` died between its snapshot and its name: `verify` and `gc` say so, for to them it
        looks like the loss of all names."""
        cache = self.folder / "cache"
        return not self.named and any(cache.glob("snapshots/*")) and not any(cache.glob("names/*/*"))

    def _dies(self, work: Callable[[], Any], at: int, before: bool) -> None:
        code, value = forked(dying(work, at, before))
        if code == KILLED:
            self.stopped.add("encode")
        self._documented(code, value)

    def _samples(self, snapshot_id: str) -> set[str]:
        def names() -> list[str]:
            snapshot = Cache(self.config.cache).open_snapshot(snapshot_id)
            count = sum(bucket.samples for bucket in snapshot.buckets)
            return [snapshot.source_item(row)[1].removesuffix(".png") for row in range(count)]

        code, value = forked(names)
        assert code == 0, value
        assert len(value) == len(set(value)), "a sample is in the snapshot twice"
        return set(value)

    def _findings(self) -> str:
        from sana_pipe.data.cache import audit

        return str(
            forked(lambda: [f"{f.path}: {f.problem}" for f in audit.verify(Cache(self.config.cache), lambda _: None)])
        )


@pytest.mark.fault
@pytest.mark.timeout(12 * 3600)  # `make fault-long`: 400 examples of half a minute
def test_every_chain_leads_back_to_a_whole_cache(
    make_config: Callable[..., Config],
    pytestconfig: pytest.Config,
    one_thread: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Examples: `--fault-seeds` times four. A failure prints its chain. Once mended it becomes a test of the code that
    failed, in addition to the others of that code."""
    set_constants(monkeypatch, {**unit_sizes(2, 3), "sana_pipe.data.work.claims.STALE_S": 0.2})
    import sana_pipe.stages.encode

    Chain.make_config = staticmethod(make_config)
    config, pictures = make_config(tmp_path, "text.mode=exact", "data.decoder=pillow"), tmp_path / "others"
    pictures.mkdir()
    for n, name in enumerate(sorted(OTHERS)):
        Image.new("RGB", SIZES[n], (9, 90, 200)).save(pictures / f"{name}.png")
        (pictures / f"{name}.txt").write_text(f"another picture, {name}")
    assert forked(lambda: sana_pipe.stages.encode.run(config, data=str(pictures))["images"])[0] == len(OTHERS)
    Chain.other = config.cache
    examples = 4 * pytestconfig.getoption("--fault-seeds")
    run_state_machine_as_test(
        Chain,
        settings=settings(
            max_examples=examples,
            stateful_step_count=15,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            derandomize=examples <= 20,
        ),
    )
