"""Choose and open what a training run reads of a cache: its held-out samples, prompts to draw, rows of prompts to keep.

What a run began with comes as a plain name. The stage puts the ids that are chosen here into the configuration, so that
a resumed run keeps them, and hands the opened parts to training as `loader.inputs.Inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sana_pipe.base.errors import CacheError, ConfigError
from sana_pipe.data.cache import prompts as prompt_sets
from sana_pipe.data.cache import withdrawn
from sana_pipe.data.cache.cache import CAPTIONS, Cache
from sana_pipe.data.cache.prompts import PromptSet
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.loader.inputs import Inputs, check_pictures, leaked
from sana_pipe.data.signals.control import ControlEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import heldout
from sana_pipe.data.sources import caption_rules

Log = Callable[[str], None]

_CAPTIONS = 8
"""Captions of the snapshot that are drawn."""
_UNUSED = {
    "mask": "--set 'train.mask={}'",
    "control": "train.controlnet (docs/guides/controlnet.md)",
    "rejected": "train.prefer (docs/guides/preferences.md)",
}
"""Records that somebody made for a training, and the setting that uses them."""


def unused_records(snapshot: Snapshot, used: Sequence[str]) -> Iterator[str]:
    """Notes on masks and controls of a snapshot that a training does not use.

    Args:
        used: the kinds of control pictures and masks that it does.
    """
    for kind, option in _UNUSED.items():
        if kind in snapshot.pictures and kind not in used:
            yield f"note: the snapshot has {kind} records, and this run does not use them; {option} does"


def unused_part(cache: Cache, snapshot: Snapshot) -> Iterator[str]:
    """A note on the held-out part of a snapshot, for a run without a validation."""
    if (there := heldout.find(cache, snapshot)) is not None:
        yield f"note: snapshot {there[:12]} was held out of this one; --set train.validation={{}} validates on it"


def held_out(cache: Cache, snapshot: Snapshot, name: str | None, samples: int, log: Log) -> Snapshot:
    """The part to validate on.

    Args:
        name: of a snapshot; None: the part that was held out of this one.
        samples: how many are read, at most.

    Raises:
        ConfigError: there is none, or it is of other encodings.
    """
    name = name or heldout.find(cache, snapshot)
    if name is None:
        raise ConfigError(
            f"train.validation: no snapshot with a name was held out of snapshot {snapshot.id[:12]}",
            fix=f"{_hold_out(snapshot)} (a larger share if there are few pictures), or --set "
            "train.validation.snapshot=NAME, or --set train.validation=null",
        )
    part = cache.open_snapshot(name)
    heldout.check(snapshot, part)
    log(f"validation: {min(len(part), samples)} of {len(part)} samples of snapshot {part.id[:12]}")
    if count := leaked(snapshot, part):
        grouped = (snapshot.head.options or {}).get("bucket", {}).get("group")
        log(
            f"warning: {count} of them look like a sample that is trained on"
            f"{f', or share a group of {grouped} with one' if grouped else ''}, so their loss is not that of unseen "
            "pictures; sana-pipe bucket --set bucket.heldout=0.01 holds out a part without copies"
        )
    return part


def _hold_out(snapshot: Snapshot) -> str:
    """The command that makes a held-out part; for a snapshot that had one, of the same pictures."""
    side = snapshot.head.policies.heldout
    return f"sana-pipe bucket --set bucket.heldout={0.01 if side is None else side.share}"


def earlier_part(cache: Cache, part: Snapshot, earlier: str | None, log: Log) -> Snapshot | None:
    """The part that the run before was validated on, if it is another than `part`.

    Args:
        earlier: its id; None: that run had none.
    """
    if earlier is None:
        return None
    try:
        old = cache.open_snapshot(earlier)
    except CacheError as error:
        log(f"note: old and new held-out samples cannot be told apart: {error.line}")
        return None
    return None if old.id == part.id else old


@dataclass(frozen=True)
class Prompts:
    """Prompt sets to draw. name: the id of the set, or `CAPTIONS`. described: how many they are, in words."""

    name: str
    sets: Sequence[PromptSet]
    described: str

    def __bool__(self) -> bool:
        return any(map(len, self.sets))


def prompts_to_draw(cache: Cache, snapshot: Snapshot, name: str | None) -> Prompts:
    """The prompts of a set, or captions of a snapshot.

    Args:
        name: of a set, its id, or `CAPTIONS`; None: the newest set, or captions if there is none.

    Raises:
        CacheError: there is no such set of the snapshot's text encoding.
    """
    encoding = snapshot.encoding(TextEncoding)
    if name is None and prompt_sets.newest(cache, prompt_sets.NAME) is None:
        name = CAPTIONS
    if name != CAPTIONS:
        chosen = prompt_sets.open_prompts(cache, name, encoding)
        return Prompts(chosen.id, [chosen], f"{len(chosen)} prompts of set {chosen.id[:12]}")
    sets = [prompt_sets.of_snapshot(snapshot, _CAPTIONS)]
    if (trigger := prompt_sets.newest(cache, prompt_sets.TRIGGER)) is not None and trigger.encoding == encoding:
        sets.append(trigger)
    counted = f"{len(sets[0])} captions of the snapshot" + "".join(f", {len(more)} prompts" for more in sets[1:])
    return Prompts(CAPTIONS, sets, counted)


def controls_to_draw(snapshot: Snapshot, size: tuple[int, int] | None) -> Prompts:
    """Captions that are drawn with the controls of their samples, all of one bucket.

    Args:
        size: height and width of the bucket; None: that with the most samples.

    Raises:
        ConfigError: the snapshot has no controls, or no such bucket.
    """
    check_pictures([snapshot], [ControlEncoding.kind])
    buckets = snapshot.buckets
    fitting = [n for n, each in enumerate(buckets) if each.samples and size in (None, (each.height, each.width))]
    if not fitting:
        raise ConfigError(
            "train.pictures: a ControlNet's pictures have the shape of their controls, which is that of a bucket",
            expected=", ".join(f"{bucket.height}x{bucket.width}" for bucket in buckets),
            found="x".join(map(str, size or ())),
            fix="--set train.pictures.size=null",
        )
    number = max(fitting, key=lambda number: buckets[number].samples)
    first = snapshot.row(number, 0)
    captions = prompt_sets.of_snapshot(snapshot, _CAPTIONS, range(first, first + buckets[number].samples))
    counted = f"{len(captions)} captions and controls of samples of snapshot {snapshot.id[:12]}"
    return Prompts(CAPTIONS, [captions], counted)


def preserved_rows(cache: Cache, snapshot: Snapshot, prompts: Sequence[str]) -> list[np.ndarray]:
    """Text rows of each of `train.preserve.prompt`: bits of bf16, uint16 (n, width).

    Raises:
        ConfigError: the cache has none of a prompt.
    """
    encoding, found = snapshot.encoding(TextEncoding), []
    for prompt in prompts:
        rows = prompt_sets.find_rows(cache, encoding, prompt, caption_rules.normalise)
        if rows is None:
            raise ConfigError(
                f"train.preserve.prompt: the cache holds no record of {prompt!r} by the snapshot's text encoding",
                fix="sana-pipe encode --prompts FILE --prompts-name preserve, with these prompts as lines of FILE",
            )
        found.append(rows)
    return found


def keep(cache: Cache, inputs: Inputs, run: str = "", host: str = "") -> None:
    """Keep the snapshots of a run from `gc`. run, host: as of `Cache.keep`.

    Raises:
        UserError: training and held-out samples overlap.
        CacheError: pictures are being taken out of the cache.
    """
    withdrawn.check_finished(cache)
    cache.keep(inputs.snapshot.id, run, host)
    if inputs.heldout is not None:
        heldout.check_disjoint(inputs.snapshot, inputs.heldout)
        cache.keep(inputs.heldout.id, run, host)
    if inputs.old_heldout is not None:
        cache.keep(inputs.old_heldout.id, run, host)
