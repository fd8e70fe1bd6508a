"""Checkpoints: torch's distributed checkpoint (DCP) and one JSON document, published whole or not at all.

`Saver` writes `step-00000500.TOKEN.tmp`, then `checkpoint.json` in it with the xxh3-128 of every file, then
renames the folder: DCP alone cannot tell a finished checkpoint from one that a kill left nearly right. Only tensors are
stored, fp32 (bf16 for `bf16_pure`), as `model.PARAMETER`, `optim.state.PARAMETER.MOMENT`, `ema.PARAMETER`,
`loss_scale.NUMBER`, and in the computation's dtype `reference.PARAMETER`; settings come from the configuration that
resumes, learning rate and seeds from the step.
Price: a copy in host memory; files are read back once; all processes see one file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_leaves

from sana_pipe.base.amounts import amount
from sana_pipe.base.disk import file_digest, make_folder, replacing, sync_path
from sana_pipe.base.errors import ConfigError, UserError, writing
from sana_pipe.base.launch import detect
from sana_pipe.base.options import value_at
from sana_pipe.base.processes import free_memory
from sana_pipe.data.loader.loader import LoaderState
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Adapter
from sana_pipe.train.models.spec import ModelSpec, spec_of
from sana_pipe.train.parallel.collectives import all_gather_objects, broadcast_from_rank_0, run_on_all
from sana_pipe.train.parallel.mesh import wait
from sana_pipe.train.parallel.parallelize import EXTRA
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training import heldout
from sana_pipe.train.training.host_copy import HostCopy, plain_parts, thread_of_this_device
from sana_pipe.train.training.lock import Lock
from sana_pipe.train.training.metadata_reader import FIX, CheckpointError, TensorOnlyReader, read_metadata, unreadable

FORMAT = "sana-pipe checkpoint"
VERSION = 2
DOCUMENT = "checkpoint.json"
ORIGIN = "from.json"
"""File in a run directory: the checkpoint that the run began from (`train --from`)."""
LAYOUT = (
    "fp32 master parameters under diffusers' names, GLUMBConv channels interleaved [value 0, gate 0, value 1, gate 1, "
    "...]; moments and averages alike"
)
_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-(\d{8,})\.[0-9a-f]+\.(tmp|removing)")
_AGAIN = "--resume auto"
_FIX = f"check the disk and the permissions, then {_AGAIN}"
_REMOVE = "remove this folder, and --resume auto takes the checkpoint before it"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False)
"""Names that are not trained are in no checkpoint; that all others are there is checked by DCP."""
IN_BACKGROUND = True
"""True: training goes on while a checkpoint is written."""
_OF_TRAINING = ("dropout",)
"""Settings of an adapter that decide how it is trained, not what it is; they may change."""
Sections = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Document:
    """Contents of `checkpoint.json`. files: name -> xxh3-128.

    began_from: the state in the checkpoint that the run began from, in `total` the steps of all runs before, and in
        `heldout` the snapshot that the other run was validated on, if any; None if the run began from start weights.
    processes: how many wrote it. written_by: versions, GPU, host and command of the first of them. adapter: where a
        part of the model is trained, its settings. base: digest of the start weights, where they are not in the
        checkpoint: the rest of the model, or the reference of `train.prefer`.
        text_kind: of the encoder whose rows were trained on; None: not known.
    """

    state: LoaderState
    architecture: ModelSpec
    config: dict[str, Any]
    files: dict[str, str]
    began_from: dict[str, Any] | None = None
    processes: int | None = None
    written_by: dict[str, Any] | None = None
    adapter: dict[str, Any] | None = None
    base: str | None = None
    text_kind: str | None = None


class Resumed(NamedTuple):
    """The checkpoint that a run continues from, or, if `begins`, that a new run begins from (`train --from`)."""

    folder: Path
    document: Document
    begins: bool = False

    @property
    def done(self) -> int:
        """Optimizer steps of the run that are done."""
        return 0 if self.begins else self.document.state.step

    @property
    def phase(self) -> int:
        """The number of runs before this one, each begun from the one before; it keys order, noise and captions."""
        return self.document.state.phase + self.begins

    def as_begun(self, option: str) -> Any:
        """An option below `train` as the run began with it; None: it begins now."""
        return None if self.begins else value_at(self.document.config["train"], option)

    @property
    def began_from(self) -> dict[str, Any] | None:
        """Return it as the documents of the run have it."""
        before = self.document.began_from
        if not self.begins:
            return before
        state = self.document.state
        values = {**state.as_dict(), "total": state.step + (before["total"] if before else 0)}
        heldout = value_at(self.document.config["train"], "validation.snapshot")
        return values if heldout is None else {**values, "heldout": heldout}


def folder_of(root: Path, step: int) -> Path:
    """`root` is the run's `checkpoints` folder."""
    return root / f"step-{step:08d}"


# ------------------------------------------------------------------------------------------------------- writing


class Saver:
    """Writes the checkpoints of one run, one at a time. All its methods, also `__init__` and `with`, are collective.

    Args:
        root: the run's `checkpoints` folder.
        contents, began_from: stored in every checkpoint; see `Document`.
        train: decides which checkpoints stay.
        log: prints a line for every published checkpoint, perhaps from another thread.
        lock: of the run directory; checked before each publication and removal.
        patience_s: how long a process waits for the others.

    Attributes:
        saved_at: when the last checkpoint of this process was complete, in seconds since 1970; None: none is.
    """

    def __init__(
        self,
        root: Path,
        contents: Mapping[str, Any],
        train: TrainConfig,
        log: Callable[[str], None],
        lock: Lock,
        began_from: dict[str, Any] | None,
        patience_s: float,
    ):
        self._root, self._contents, self._train, self._log = root, contents, train, log
        self._lock, self._began_from = lock, began_from
        self._earlier_leftovers = leftovers(root)  # of earlier attempts: no later one begins during the lock
        self._thread = thread_of_this_device("checkpoint") if IN_BACKGROUND else None
        self._host_copy = HostCopy(log)
        # The thread's collectives must not mix with those of the training: a separate group.
        self._group = dist.new_group(backend="gloo", timeout=wait(patience_s)) if self._thread else None
        self._in_flight: Future[Path] | None = None
        self._copies: bool | None = None  # whether main memory holds them; None: not known yet
        self.saved_at: float | None = None

    @property
    def failed(self) -> bool:
        """Return whether the save in flight has failed on this process. Not collective; `wait` raises the error."""
        return self._in_flight is not None and self._in_flight.done() and self._in_flight.exception() is not None

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: LoaderState, more: Sections | None = None
    ) -> None:
        """Publish a checkpoint and remove old ones; in the background, after a copy of all tensors, if
        main memory holds it.

        Args:
            more: further tensors of the run: section -> name -> tensor, plain or sharded.

        Raises:
            CheckpointError: this save or the save before failed (the same message on every process), or the processes
                do not see one file system. Published checkpoints stay.
        """
        self.wait()
        tensors = state_tensors(model, optimizer, more)
        if self._thread is None or not self._has_memory_for_a_copy(tensors):
            self._write(tensors, state)
        else:
            self._in_flight = self._thread.submit(self._write, self._host_copy.of(tensors), state)

    def _has_memory_for_a_copy(self, tensors: dict[str, Any]) -> bool:
        """Return whether main memory holds the copies of all processes of every host; decided at the first save."""
        if self._copies is None:
            leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
            needed = detect().local_world * sum(part.nbytes for leaf in leaves for part in plain_parts(local(leaf)))
            free = free_memory()
            self._copies = all(all_gather_objects(not free or free >= needed))
            if not self._copies:
                about = f"{amount(needed)} for copies, {amount(free)} are free on the first host"
                self._log(
                    f"note: training waits while a checkpoint is written: there is too little main memory ({about})"
                )
        return self._copies

    def wait(self) -> None:
        """Wait until no save is in flight. Raises as `save`."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, raised: type[BaseException] | None, *rest: object) -> None:
        try:
            with contextlib.nullcontext() if raised is None else contextlib.suppress(Exception):
                self.wait()  # an error that is being raised goes first
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _write(self, tensors: dict[str, Any], state: LoaderState) -> Path:
        final = folder_of(self._root, state.step)
        work = final.with_name(f"{final.name}.{self._lock.token}.tmp")
        try:
            self._write_into(work, final, tensors, state)
        except UserError:  # the same on every process
            if dist.get_rank() == 0:
                shutil.rmtree(work, ignore_errors=True)
            raise
        broadcast_from_rank_0(self.remove_old, self._group)
        self.saved_at = time.time()
        self._log(f"saved {final}")
        return final

    def _write_into(self, work: Path, final: Path, tensors: dict[str, Any], state: LoaderState) -> None:
        group = self._group
        broadcast_from_rank_0(lambda: self.prepare(work), group)
        writer = _Writer(work)
        _dcp(lambda: dcp.save(tensors, storage_writer=writer, process_group=group), f"{work}: could not be written")
        files = self._read_back(work)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "layout": LAYOUT,
            "state": state.as_dict(),
            **self._contents,
            "processes": dist.get_world_size(),
            "torch": torch.__version__,
            "files": files,
            **({"began_from": self._began_from} if self._began_from else {}),
        }
        broadcast_from_rank_0(lambda: publish(work, final, document, self._lock), group)

    def _read_back(self, work: Path) -> dict[str, str]:
        """Digest of every file, each read by one process."""
        rank, world = dist.get_rank(), dist.get_world_size()

        def digests() -> dict[str, str]:
            with _writing(work):
                names = sorted(path.name for path in work.iterdir() if _reader(path.name, world) == rank)
                return {name: file_digest(work / name) for name in names}

        parts = all_gather_objects(run_on_all(digests, self._group), self._group)
        return {name: digest for part in parts for name, digest in part.items()}

    def prepare(self, work: Path) -> None:
        self._lock.check()
        with _writing(work):
            make_folder(self._root)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()

    def remove_old(self) -> None:
        """Remove all checkpoints but the newest `keep_checkpoints`, those of every `keep_every`th step and those with
        the lowest held-out loss, and the leftovers of interrupted saves and removals of this attempt and earlier ones.
        Each checkpoint is renamed first: a half-removed checkpoint must not look damaged."""
        train, token = self._train, self._lock.token
        for path in leftovers(self._root):
            if path in self._earlier_leftovers or f".{token}." in path.name:
                self._lock.check()
                shutil.rmtree(path, ignore_errors=True)
        there = complete(self._root)
        older = there[: -train.keep_checkpoints]
        if not older:
            return
        try:
            lowest = heldout.lowest(self._root.parent, [step_of(path) for path in there])
        except (OSError, UserError) as error:
            self._log(f"warning: no checkpoint is removed, because the held-out losses cannot be read: {error}")
            return
        for path in older:
            if step_of(path) in lowest or (train.keep_every is not None and step_of(path) % train.keep_every == 0):
                continue
            self._lock.check()
            removing = path.with_name(f"{path.name}.{token}.removing")
            os.rename(path, removing)
            shutil.rmtree(removing, ignore_errors=True)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, more: Sections | None) -> dict[str, Any]:
    """Tensors of model, optimizer and `more` by section; DTensors where the model is sharded. Memory is shared."""
    optimizer.zero_grad(set_to_none=True)  # with gradients present, torch would not create missing moments
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    state = {name: value for name, value in moments.items() if name.startswith("state.")}
    return {"model": weights, "optim": state, **(more or {})}


def _writing(place: Path) -> contextlib.AbstractContextManager[None]:
    return writing(place, _FIX, CheckpointError, again=_AGAIN)


class _Writer(dcp.FileSystemWriter):
    """DCP's writer without copies ahead: with them it takes a loader that synchronises the GPU about every 10 MB, also
    where all tensors are in host memory. It names a full disk, which torch's errors do not."""

    def __init__(self, folder: Path):
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with _writing(Path(self.path)):
            return super().write_data(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        with _writing(Path(self.path)):
            super().finish(*args, **kwargs)


def _dcp(call: Callable[[], Any], what: str) -> None:
    """Run a DCP call. Its CheckpointException is not an Exception: ordinary handlers would miss it."""
    try:
        call()
    except CheckpointException as error:
        errors = [failure[0] for failure in error.failures.values()]
        for one in errors:
            if isinstance(one, UserError):
                raise one from None
        reasons = {f"{type(one).__name__}: {one}" for one in errors}
        raise CheckpointError(what, found="; ".join(sorted(reasons)), fix=_FIX) from None


def publish(work: Path, final: Path, document: dict[str, Any], lock: Lock) -> None:
    present = {path.name for path in work.iterdir()}
    unseen = sorted(set(document["files"]) - present)
    if unseen or ".metadata" not in present:
        raise CheckpointError(
            f"{work}: the first process does not see files that others wrote",
            found="not seen: " + ", ".join(unseen or [".metadata"]),
            fix="put train.output on a file system that all nodes share",
        )
    document = {**document, "digest": digest_of(document)}
    with _writing(final):
        with replacing(work / DOCUMENT) as file:
            file.write_text(json.dumps(document, indent=1), encoding="utf-8")
        lock.check()
        os.rename(work, final)
        sync_path(final.parent)


# ------------------------------------------------------------------------------------------------------- finding


def complete(root: Path) -> list[Path]:
    """Published checkpoints by step, oldest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _COMPLETE.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step of a published checkpoint."""
    return int(path.name.removeprefix("step-"))


def leftovers(root: Path) -> list[Path]:
    """Folders of saves or removals that were interrupted."""
    return sorted(p for p in root.iterdir() if _LEFTOVER.fullmatch(p.name)) if root.is_dir() else []


def newest(root: Path) -> Path | None:
    """The last published checkpoint (`--resume auto`), or None."""
    published = complete(root)
    return published[-1] if published else None


@contextlib.contextmanager
def _there(folder: Path) -> Iterator[None]:
    """Raise errors of reading a checkpoint that is not there any more as that: its training may remove it meanwhile."""
    try:
        yield
    except CheckpointError:
        if folder.exists():
            raise
        last = newest(folder.parent)
        raise CheckpointError(
            f"{folder} was removed: a training keeps its newest checkpoints and the best",
            found=None if last is None else f"the newest is {last}",
            fix="run the command again with the newest; train.keep_checkpoints and train.keep_every can keep more",
        ) from None


def read_document(folder: Path) -> Document:
    """Read and check `checkpoint.json`; the files that it names are checked by `verify`.

    Raises:
        CheckpointError: no checkpoint, one of another version, or a damaged one.
    """
    path = folder / DOCUMENT
    hint = f"give another checkpoint; {_REMOVE}"
    with _there(folder):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            digest = values.pop("digest")
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{folder} is not a complete checkpoint",
                expected=f"{DOCUMENT} in it",
                fix=f"give a folder such as RUN/checkpoints/{folder_of(Path(), 500).name}, or restore the file",
            ) from None
        except OSError as error:
            raise unreadable(path, error) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: is damaged: {error}", fix=hint) from None
        if values.get("format") != FORMAT or values.get("version") != VERSION:
            raise CheckpointError(
                f"{path}: has another format",
                expected=f"{FORMAT!r} version {VERSION}",
                found=f"{values.get('format')!r} version {values.get('version')!r}",
                fix="use the version of sana-pipe that wrote it",
            )
        if digest != digest_of(values):
            raise CheckpointError(f"{path}: is damaged: its digest does not match its text", fix=hint)
        given = {field.name: values[field.name] for field in fields(Document) if field.name in values}
        state, architecture = LoaderState.from_dict(values["state"]), spec_of(values["architecture"], str(path))
        return Document(**{**given, "state": state, "architecture": architecture})


def verify(folder: Path, document: Document, rank: int = 0, world: int = 1) -> None:
    """Check the bytes of this process's share of the files against their digests."""
    for name, digest in sorted(document.files.items()):
        if _reader(name, world) != rank:
            continue
        with _there(folder):
            try:
                found = file_digest(folder / name)
            except FileNotFoundError:
                fix = f"restore the file, or {_REMOVE}"
                raise CheckpointError(f"{folder / name}: is missing", fix=fix) from None
            except OSError as error:
                raise unreadable(folder / name, error) from None
        if found != digest:
            what = f"{folder / name}: is damaged: its bytes have changed since they were written"
            raise CheckpointError(what, fix=_REMOVE)


def check_belongs(
    folder: Path, document: Document, first_state: LoaderState, architecture: ModelSpec, adapter: Adapter | None = None
) -> None:
    """Refuse to continue a run with another order of the data or another model."""
    stored, here = asdict(document.state), asdict(first_state)
    differences = [
        *_differing("", *({name: state.pop(name) for name in ("snapshot", "phase")} for state in (stored, here))),
        *_differing("train.", stored, here, ["step"]),
        *_of_another_model(document, architecture, adapter),
    ]
    if differences:
        anew = (
            "train another model from its start: --set train.output=DIR"
            if _of_another_model(document, architecture, adapter, architecture.free)
            else "begin a new run with the weights, moments and averages of this checkpoint: "
            f"{beginning(folder)} in place of --resume"
        )
        raise CheckpointError(
            f"{folder}: belongs to another run\n  " + "\n  ".join(differences),
            fix=f"restore those settings (--snapshot takes the id), or {anew}",
        )


def beginning(place: Path) -> str:
    """The options that begin a new run from a checkpoint or a run directory."""
    return f"--from {place} --set train.output=DIR"


def _of_another_model(
    document: Document, architecture: ModelSpec, adapter: Adapter | None, free: Collection[str] = ()
) -> list[str]:
    part = None if adapter is None else adapter.to_dict()
    return [
        *_differing("model.", document.architecture.to_dict(), architecture.to_dict(), free),
        *_differing("train.", _by_section(document.adapter), _by_section(part)),
    ]


def _by_section(part: dict[str, Any] | None) -> dict[str, Any]:
    """Return what is trained of a model, by the section of `train` that says it; empty: all of it."""
    if part is None:
        return {}
    kind = part["kind"]
    shape = {name: value for name, value in part.items() if name not in _OF_TRAINING}
    return {kind if kind in ("only", "controlnet") else "adapter": shape}


def _differing(section: str, stored: dict[str, Any], here: dict[str, Any], free: Collection[str] = ()) -> list[str]:
    lines = []
    for name in sorted({*stored, *here} - {*free}):
        one, other = stored.get(name), here.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            lines += _differing(f"{section}{name}.", one, other)
        elif one != other:
            lines.append(f"{section}{name}: the checkpoint has {_shortened(one)}, this run {_shortened(other)}")
    return lines


def _shortened(value: Any) -> Any:
    """A setting for a message: an adapter's targets are hundreds of modules."""
    if isinstance(value, dict):
        return {name: _shortened(part) for name, part in value.items()}
    return f"{len(value)} of {value[0]} ... {value[-1]}" if isinstance(value, list) and len(value) > 4 else value


def check_begins(folder: Path, document: Document, architecture: ModelSpec, adapter: Adapter | None = None) -> None:
    """Refuse to begin from a checkpoint of another model."""
    if differences := _of_another_model(document, architecture, adapter, architecture.free):
        raise CheckpointError(
            f"--from {folder} is a checkpoint of another model\n  " + "\n  ".join(differences),
            fix="give the configuration the checkpoint's values (config.yaml in its run directory has them); only "
            f"{' and '.join(architecture.free)} may differ",
        )


# ------------------------------------------------------------------------------------------------------- reading


def load(
    folder: Path,
    document: Document,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    more: Sections | None = None,
    moments: bool = True,
) -> set[str]:
    """Restore model and optimizer in place, on any number of processes. The optimizer's settings stay as they are.

    Args:
        more: as given to `save`; its tensors are overwritten.
        moments: False: the optimizer's state stays as it is.

    Returns:
        The sections of `more` that the checkpoint lacks; their tensors stay as they are.

    Raises:
        CheckpointError: damaged bytes, or tensors that do not fit.
    """

    def verified_sections() -> set[str]:
        verify(folder, document, dist.get_rank(), dist.get_world_size())
        with _there(folder):
            return {name.partition(".")[0] for name in read_metadata(folder / ".metadata").state_dict_metadata}

    sections = run_on_all(verified_sections)
    tensors: dict[str, Any] = {name: part for name, part in (more or {}).items() if name in sections}
    if moments:
        tensors = state_tensors(model, optimizer, tensors)
    else:  # torch would make moments, and count their first step
        tensors["model"] = get_model_state_dict(model, options=_OPTIONS)
    with _there(folder):
        _dcp(
            lambda: dcp.load(tensors, storage_reader=TensorOnlyReader(str(folder))),
            f"{folder}: could not be read into this model",
        )
    set_model_state_dict(model, tensors["model"], options=_OPTIONS)
    if moments:
        state = {**get_optimizer_state_dict(model, optimizer, options=_OPTIONS), **tensors["optim"]}
        set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)
    return set(more or {}) - sections


EMA_WEIGHTS, LAST_WEIGHTS = "EMA weights", "last weights"
"""The two sets of weights of a checkpoint, in messages and files."""


class ModelTensors(Mapping[str, Tensor]):
    """The model's weights in a checkpoint by parameter name (fp32, CPU, our layout), each read on access, without what
    an objective has next to them. Needs no process group.

    Args:
        folder: `.../checkpoints/step-00000500`.
        ema: read the EMA weights instead of the last weights.

    Attributes:
        weights: `EMA_WEIGHTS` or `LAST_WEIGHTS`.
        has_ema: whether the checkpoint holds EMA weights.

    Raises:
        CheckpointError: an incomplete or damaged checkpoint, or one without EMA weights.
    """

    def __init__(self, folder: str | Path, *, ema: bool = False):
        self.folder = Path(folder)
        self._section = "ema." if ema else "model."
        self.document = read_document(self.folder)
        verify(self.folder, self.document)
        self.architecture = self.document.architecture
        self._reader = TensorOnlyReader(str(self.folder))
        with _there(self.folder):
            self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._entries: dict[str, Any] = {  # of tensors alone: the reader refuses others
            name.removeprefix(self._section): entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(self._section) and not name.startswith(f"{self._section}{EXTRA}.")
        }
        self.weights = EMA_WEIGHTS if ema else LAST_WEIGHTS
        self.has_ema = any(name.startswith("ema.") for name in self._metadata.state_dict_metadata)
        if ema and not self.has_ema:
            raise CheckpointError(
                f"{folder}: holds no {EMA_WEIGHTS}",
                fix="leave --ema out; for EMA weights set train.ema: {decay: 0.9999} in training",
            )

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty(self._entries[name].size, dtype=torch.float32)
        planner = dcp.DefaultLoadPlanner()
        with _there(self.folder):
            try:
                planner.set_up_planner({self._section + name: tensor}, self._metadata, is_coordinator=True)
                self._reader.read_data(planner.create_local_plan(), planner).wait()
            except Exception as error:  # metadata and files of a foreign checkpoint make torch raise nearly every type
                # a missing file is one that the metadata of a foreign checkpoint names: all files of ours were verified
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                    raise unreadable(self.folder, error) from None
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise CheckpointError(f"{self.folder}: {name} could not be read: {text}", fix=FIX) from None
        return tensor

    def __str__(self) -> str:
        other = "" if self.weights == EMA_WEIGHTS or not self.has_ema else f" (--ema takes its {EMA_WEIGHTS})"
        return f"the {self.weights} of {self.folder}{other}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def as_trained(train: TrainConfig, earlier: dict[str, Any]) -> TrainConfig:
    """The options of `train` with what decides a drawing as it was in a training (`earlier`, a whole configuration):
    pictures are those that it draws, whatever the file says today."""
    then = earlier["train"]
    return train.model_copy(
        update={"numerics": then["numerics"], "flow": type(train.flow).model_validate(then["flow"])}
    )


def other_drawing(train: TrainConfig, trained: TrainConfig) -> list[str]:
    """Say what `as_trained` has changed, in words: `train.flow.shift is 3.0, not 1.0`."""
    values = [("flow.shift", trained.flow.shift, train.flow.shift), ("numerics", trained.numerics, train.numerics)]
    return [f"train.{name} is {old}, not {new}" for name, old, new in values if old != new]


def resolve(root: Path, resume: str | Path, option: str = "--resume") -> Path | None:
    """The folder that `--resume`, `--from` or `--checkpoint` means: `auto` is the newest in `root` (None if there is
    none; not for `--from`), a run directory its newest checkpoint, any other folder itself.

    Raises:
        ConfigError: a path that is no folder, a run directory without checkpoints, or a folder of runs.
    """
    if str(resume) == "auto" and option != "--from":
        return newest(root)
    folder = Path(resume)
    inside = newest(folder / "checkpoints")
    if not folder.is_dir() or (inside is None and (folder / "checkpoints").is_dir()):
        raise ConfigError(
            f"{resume}: there is no such folder" if not folder.is_dir() else f"{resume} holds no checkpoint yet",
            expected=f"{'' if option == '--from' else 'auto, '}a run directory, or a folder such as "
            f"{folder_of(root, 500)}",
        )
    if inside is None:
        refuse_runs(folder, option)
    return inside or folder


def refuse_runs(folder: Path, option: str) -> None:
    """Refuse a folder of run directories in place of one: `option` has to choose.

    Raises:
        ConfigError: it holds at least one with a checkpoint.
    """
    written = {path.parent: last.stat().st_mtime for path in folder.glob("*/checkpoints") if (last := newest(path))}
    if written:
        raise ConfigError(
            f"{folder} is not a run directory, but holds {len(written)} of them",
            found=", ".join(sorted(path.name for path in written)),
            fix=f"{option} {shlex.quote(str(max(written, key=written.__getitem__)))} (written last)",
        )


def find(output: str | Path, checkpoint: str) -> Path:
    """The folder that `--checkpoint` names: `auto` is the newest of `train.output`; else see `resolve`."""
    root = Path(output) / "checkpoints"
    folder = resolve(root, checkpoint, "--checkpoint")
    if folder is None:
        refuse_runs(root.parent, "--checkpoint")
        raise ConfigError(f"{root} holds no checkpoint yet", fix="sana-pipe train, or --checkpoint PATH")
    return folder


def find_best(output: str | Path, run: str, *, ema: bool = False) -> tuple[Path, float]:
    """The checkpoint with the lowest held-out loss, and its loss.

    Args:
        output: `train.output`.
        run: `auto` (that one), or a run directory.
        ema: by the loss of the EMA weights.

    Raises:
        ConfigError: no run directory; no checkpoint of it has a held-out loss.
    """
    if run != "auto" and _COMPLETE.fullmatch(Path(run).resolve().name):
        raise ConfigError(
            f"--best chooses a checkpoint of a run, and --checkpoint {run} is a checkpoint already",
            fix="leave one of them out",
        )
    find(output, run)  # its errors
    root = Path(output if run == "auto" else run) / "checkpoints"
    there = {step_of(path): path for path in complete(root)}
    if not there:
        raise ConfigError(f"--checkpoint {run}: is not a run directory", expected="checkpoints/step-XXXXXXXX in it")
    chosen = heldout.best(root.parent, there, ema=ema)
    if chosen is None:
        whose = f"held-out loss of the {EMA_WEIGHTS}" if ema else "held-out loss"
        raise ConfigError(
            f"no checkpoint of {root.parent} has a {whose}",
            expected=f"a validation in {root.parent / heldout.METRICS} after the step of a checkpoint",
            found=f"checkpoints of the steps {', '.join(map(str, there))}",
            fix="leave --best out for the newest checkpoint",
        )
    step, losses = chosen
    return there[step], losses[step]


def choose(run: Path, resume: str | Path | None, origin: str | Path | None = None) -> tuple[Resumed | None, list[str]]:
    """The checkpoint that a run resumes or begins from (None: start weights), and lines to print. A run that is resumed
    before its first checkpoint begins again where it began. Writes nothing.

    Args:
        resume: `--resume`; None starts anew. origin: `--from`.

    Raises:
        ConfigError: a new run in a directory that holds checkpoints, or an older checkpoint than its newest.
        CheckpointError: the checkpoint cannot be read.
    """
    root = run / "checkpoints"
    last = newest(root)
    notes = [f"note: {path} was left by an interrupted save and is ignored" for path in leftovers(root)]
    if origin is not None and resume is not None and str(resume) != "auto":
        raise ConfigError(
            f"--from {origin} and --resume {resume} name two checkpoints",
            fix="--from begins a new run, --resume continues one; --from with --resume auto begins it once, then "
            "continues it",
        )
    if resume is None and last is not None:
        raise ConfigError(
            f"the run directory {run} already holds checkpoints, the newest is {last.name}",
            fix="--resume auto to continue it, or --set train.output=DIR for a new run",
        )
    folder = None if resume is None else resolve(root, resume)
    if folder is not None:
        if last is not None and last.resolve() != folder.resolve():
            raise ConfigError(
                f"--resume {folder}: the run directory {run} holds another, newer checkpoint, {last.name}",
                fix="--resume auto to continue from that one, or --set train.output=DIR to branch off into a new run",
            )
        if origin is not None:
            notes.append(f"--from {origin} is not used: the run has begun, and its newest checkpoint is {folder.name}")
        return Resumed(folder, read_document(folder)), notes
    if origin is None and resume is not None:
        origin = recorded_origin(run)
    folder = None if origin is None else resolve(root, origin, "--from")
    if folder is not None:
        return Resumed(folder, read_document(folder), begins=True), notes
    if resume is not None:
        notes.append(f"no checkpoint in {root.resolve()} yet: starting from the beginning")
    return None, notes


def record(run: Path, resumed: Resumed | None) -> None:
    """Write `from.json`: the checkpoint that this run begins from; without one, remove what an earlier run left."""
    path = run / ORIGIN
    if resumed is None:
        path.unlink(missing_ok=True)
    elif resumed.begins:
        values = {"checkpoint": str(resumed.folder.resolve()), **(resumed.began_from or {})}
        with replacing(path) as work:
            work.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def recorded_origin(run: Path) -> str | None:
    """The checkpoint that a run began from, as `record` wrote it.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = run / ORIGIN
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["checkpoint"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error}", fix="give the checkpoint that the run began from: --from CHECKPOINT"
        ) from None


def _reader(name: str, world: int) -> int:
    """The process that reads a file back: its writer, or with fewer processes another."""
    match = re.match(r"__(\d+)_", name)
    return int(match[1]) % world if match else 0


def digest_of(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())
