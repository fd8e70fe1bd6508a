"""Checkpoints alongside the training: what is copied, what a failed save does, which ones are kept."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from sana_pipe.base.errors import ConfigError, NoSpaceError, UserError
from sana_pipe.base.launch import Launch
from sana_pipe.config import Config
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models.sana_files import WeightFiles, save_weights
from sana_pipe.train.parallel import data_parallel, mesh
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.train.training import assemble, checkpoint, host_copy, metrics, optimizers
from sana_pipe.train.training.host_copy import HostCopy
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit, generator_seed
from tests.support.messages import naming
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def train(settings: Config, *, resume: str | Path | None = None, **options: Any) -> Report:
    return fit(settings.train, tiny_run.task(settings, **options), Launch(), resume=resume, log=lambda line: None)


def files(folder: Path) -> dict[str, Any]:
    """Names, sizes and digests of the tensors' files."""
    return {name: value for name, value in checkpoint.read_document(folder).files.items() if name != ".metadata"}


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# -------------------------------------------------------------------------------------------------- in the background


def test_a_save_in_the_background_holds_the_weights_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held until two more steps are done; what it then writes is what a waiting save writes."""
    with monkeypatch.context() as waiting:
        waiting.setattr(checkpoint, "IN_BACKGROUND", False)
        train(tiny_run.config(tmp_path / "waited", steps=3))
    save, go, writers = dcp.save, threading.Event(), []

    def blocked(*args: Any, **options: Any) -> Any:
        writers.append(threading.current_thread())
        assert go.wait(60)
        return save(*args, **options)

    def touch(step: int) -> Batch | None:
        if step == 5:
            (work,) = names(tmp_path / "aside")
            assert work.startswith("step-00000003.") and work.endswith(".tmp"), "the save is not done"
            go.set()
        return None

    monkeypatch.setattr(dcp, "save", blocked)
    train(tiny_run.config(tmp_path / "aside", steps=7, save_every=3), touch=touch)
    assert threading.main_thread() not in writers
    actual, expected = (tmp_path / name / "checkpoints/step-00000003" for name in ("aside", "waited"))
    assert files(actual) == files(expected)
    assert names(tmp_path / "aside") == ["step-00000003", "step-00000006", "step-00000007"], "the last is waited for"


def test_training_waits_for_a_save_where_main_memory_does_not_hold_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, writers, said = dcp.save, [], list[str]()

    def noted(*args: Any, **options: Any) -> Any:
        writers.append(threading.current_thread())
        return save(*args, **options)

    monkeypatch.setattr(dcp, "save", noted)
    train(tiny_run.config(tmp_path / "plenty", steps=2, save_every=1))
    assert threading.main_thread() not in writers
    writers.clear()
    monkeypatch.setattr(checkpoint, "free_memory", lambda: 1000)
    monkeypatch.setattr(HostCopy, "of", lambda *args: pytest.fail("a copy was taken"))
    short = tiny_run.config(tmp_path / "short", steps=2, save_every=1)
    fit(short.train, tiny_run.task(short), Launch(), log=said.append)
    assert {*writers} == {threading.main_thread()} and len(writers) == 2
    assert len([line for line in said if "too little main memory" in line]) == 1
    both = (tmp_path / name / "checkpoints/step-00000002" for name in ("plenty", "short"))
    assert files(next(both)) == files(next(both))


def test_at_most_one_save_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of the tensors is taken while one is being written."""
    save, host_copy, running, seen = dcp.save, HostCopy.of, threading.Event(), []

    def slow(*args: Any, **options: Any) -> Any:
        threading.Event().wait(0.3)
        running.clear()
        return save(*args, **options)

    def copy(buffer: HostCopy, tensors: Any) -> Any:
        seen.append(running.is_set())
        running.set()
        return host_copy(buffer, tensors)

    monkeypatch.setattr(dcp, "save", slow)
    monkeypatch.setattr(HostCopy, "of", copy)
    train(tiny_run.config(tmp_path / "run", steps=3, save_every=1))
    assert seen == [False, False, False]
    assert names(tmp_path / "run") == [f"step-{step:08d}" for step in (1, 2, 3)]


@pytest.mark.parametrize("aside", [True, False])
def test_a_save_that_fails_stops_the_run_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    write, failed = FileSystemWriter.write_data, threading.Event()

    def full(writer: FileSystemWriter, *rest: Any) -> Any:
        if "00000004" in str(writer.path):
            failed.set()
            raise OSError(28, "No space left on device", str(writer.path))
        return write(writer, *rest)

    def touch(step: int) -> Batch | None:
        if step == 4:  # the loop asks after the step; by then the thread has its error
            assert failed.wait(60)
            threading.Event().wait(0.3)
        return None

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    monkeypatch.setattr(checkpoint, "IN_BACKGROUND", aside)
    settings = tiny_run.config(tmp_path / "run", steps=50, save_every=2)
    with pytest.raises(NoSpaceError, match=r"(?s)step-00000004\.\w+\.tmp.*--resume auto"):
        train(settings, touch=touch)
    assert metrics.read(tmp_path / "run/metrics.jsonl")[-1]["step"] == (5 if aside else 4)
    newest = checkpoint.newest(tmp_path / "run/checkpoints")
    assert newest is not None and newest.name == "step-00000002"


def test_a_last_save_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: FileSystemWriter, *rest: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(NoSpaceError, match=r"step-00000002\.\w+\.tmp"):
        train(tiny_run.config(tmp_path / "run", steps=2))
    assert checkpoint.newest(tmp_path / "run/checkpoints") is None


def test_a_save_in_flight_is_published_when_another_error_ends_the_run(tmp_path: Path) -> None:
    def touch(step: int) -> Batch | None:
        if step == 2:
            raise ConfigError("the loader ends here")
        return None

    with pytest.raises(ConfigError, match="the loader ends here"):
        train(tiny_run.config(tmp_path / "run", steps=4, save_every=2), touch=touch)
    assert names(tmp_path / "run") == ["step-00000002"]


def test_the_copy_shares_nothing_and_keeps_every_class() -> None:
    settings = tiny_run.config(precision="bf16")
    with mesh.open_mesh(Launch(), ParallelConfig(), CPU) as device_mesh:
        model = tiny_run.model(settings)
        data_parallel.apply_fsdp(model, model.blocks, device_mesh, settings.train)
        optimizer = optimizers.build(model, settings.train.optim, CPU)
        before = checkpoint.state_tensors(model, optimizer, None)
        copy = HostCopy().of(before)
        flat = {(kind, name): value for kind in before for name, value in before[kind].items()}
        for (kind, name), value in flat.items():
            other = copy[kind][name]
            assert type(other) is type(value)
            ours, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (value, other))
            assert torch.equal(ours, theirs)
            assert ours.data_ptr() != theirs.data_ptr()
        assert any(isinstance(value, DTensor) for value in flat.values())
        assert any(type(value) is Tensor for value in flat.values())
    assert not dist.is_initialized()


def test_every_save_reuses_the_copies_of_the_one_before() -> None:
    """Each copy has a storage of its size: DCP would clone a larger one."""
    tree = {"model": {"a": torch.randn(3, 7), "b": torch.randn(5).bfloat16(), "none": torch.empty(0, 4)}, "other": 1}
    buffer, places = HostCopy(), []
    for turn in range(3):
        tree["model"]["a"] += 1  # type: ignore[index]
        copied = buffer.of(tree)
        assert copied["other"] == 1
        for name, tensor in tree["model"].items():  # type: ignore[attr-defined]
            copy = copied["model"][name]
            assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype and copy.shape == tensor.shape, turn
            assert copy.untyped_storage().size() == copy.nbytes
        places.append([copy.data_ptr() for copy in copied["model"].values()])
    assert places[0] == places[1] == places[2]


class Stream:
    def synchronize(self) -> None: ...


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_copies_of_tensors_of_a_gpu_are_page_locked_once_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append("lock")
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append("release")
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(Stream, "synchronize", lambda self: calls.append("wait"))
    buffer, given = HostCopy(), torch.zeros(4)
    for _ in range(2):
        buffer.of({"a": given})
    assert calls == ["lock", "wait", "wait"]
    del buffer
    gc.collect()
    assert calls[3:] == ["release"]


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_memory_that_cannot_be_page_locked_leaves_no_error_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        last_error = 0

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            Runtime.last_error = 2
            return 2

    class Library:
        def __init__(self, name: str | None):
            assert name is None, "the runtime that torch has loaded"

        def cudaGetLastError(self) -> int:
            error, Runtime.last_error = Runtime.last_error, 0
            return error

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(host_copy.ctypes, "CDLL", Library)
    notes: list[str] = []
    buffer, given = HostCopy(notes.append), torch.arange(4.0)
    for _ in range(2):
        assert torch.equal(buffer.of({"a": given})["a"], given)
    assert Runtime.last_error == 0
    assert len(notes) == 1 and "page-locked" in notes[0]


def test_the_saving_thread_uses_the_gpu_of_its_process_and_never_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a GPU (the names of torch.cuda stand in for it) torch's default loader would synchronise it."""
    devices, loaders = [], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: devices.append((number, threading.current_thread())))
    serial, overlapping = filesystem._SerialCpuLoader, filesystem._OverlappingCpuLoader

    def chosen(name: str) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            loaders.append(name)
            return serial(args[0])

        return make

    monkeypatch.setattr(filesystem, "_SerialCpuLoader", chosen(serial.__name__))
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", chosen(overlapping.__name__))
    save = dcp.save

    def saved(*args: Any, **options: Any) -> Any:
        saving = threading.current_thread()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: threading.current_thread() is saving)
            return save(*args, **options)

    monkeypatch.setattr(dcp, "save", saved)
    train(tiny_run.config(tmp_path / "run", steps=2, save_every=1, trackers=[]))
    assert loaders == [serial.__name__] * 2
    ((number, thread),) = devices
    assert number == 3 and thread.name.startswith("checkpoint")


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, rename, calls = os.fsync, os.rename, list[tuple[str, Path]]()

    def synced(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        calls.append(("rename", Path(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    train(tiny_run.config(tmp_path / "run", steps=1))
    root = tmp_path / "run/checkpoints"
    final = root / "step-00000001"
    at = calls.index(("rename", final))
    before, after = calls[:at], calls[at + 1 :]
    document = f".{checkpoint.DOCUMENT}.{os.getpid()}.partial"
    work = {path.parent for kind, path in before if path.name == document}.pop()
    for path in final.iterdir():
        names = {path.name, path.name + ".tmp", f".{path.name}.{os.getpid()}.partial"}  # torch renames its own, too
        assert {("sync", work / name) for name in names} & set(before), path.name
    assert before.index(("sync", work)) > before.index(("sync", work / document))
    assert ("sync", root) in after


# ----------------------------------------------------------------------------------------------------- first values


def test_the_model_has_no_memory_until_it_is_parallelized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallelize, seen = assemble.parallelize, []

    def watched(model: torch.nn.Module, *rest: Any) -> Any:
        seen.append({parameter.device.type for parameter in model.parameters()})
        return parallelize(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(assemble, "parallelize", watched)
    train(tiny_run.config(tmp_path / "run", steps=1))
    train(tiny_run.config(tmp_path / "run", steps=2), resume="auto")
    assert seen == [{"meta"}, {"meta"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_box_of_a_stored_parameter(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_run.model(tiny_run.config())
    save_weights(model.state_dict(), model.config, tmp_path, dtype, max_shard_bytes=20_000)
    files, drawn = WeightFiles(tmp_path), model.config.initial(0)
    chance = torch.Generator().manual_seed(0)
    for name, whole in model.state_dict().items():
        for _ in range(4):
            offsets = [int(torch.randint(side, (), generator=chance)) for side in whole.shape]
            lengths = [
                1 + int(torch.randint(side - at, (), generator=chance))
                for side, at in zip(whole.shape, offsets, strict=True)
            ]
            box = tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
            assert torch.equal(files.read(name, offsets, lengths), whole[box].to(dtype)), (name, box)
            assert torch.equal(drawn.read(name, offsets, lengths), whole[box]), (name, box)


def test_a_disk_that_does_not_read_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny_run.config(tmp_path / "run", steps=1))
    folder = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert folder is not None
    tensors, opened = next(name for name in files(folder)), list[str]()

    def failing_as(real: Any) -> Any:
        def reads(path: Path, *args: Any, **options: Any) -> Any:
            opened.append(path.name)
            if (path.name, opened.count(path.name)) == failing:
                raise OSError(errno.EIO, "Input/output error")
            return real(path, *args, **options)

        return reads

    monkeypatch.setattr(Path, "open", failing_as(Path.open))
    monkeypatch.setattr(checkpoint, "file_digest", failing_as(checkpoint.file_digest))
    # a file is first read for its digest, then for its contents
    for failing in [("checkpoint.json", 1), (tensors, 1), (".metadata", 1), (".metadata", 2), (tensors, 2)]:
        opened.clear()
        with pytest.raises(checkpoint.CheckpointError, match="Input/output") as caught:
            dict(checkpoint.ModelTensors(folder))
        assert "disk" in str(caught.value.fix) and "remove" not in str(caught.value.fix), failing


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    model = tiny_run.model(tiny_run.config())
    prints = [model.config.initial(0).fingerprint(), model.config.initial(1).fingerprint()]
    for name, change in (("a", 0.0), ("b", 1.0)):
        state = {key: value.clone() for key, value in model.state_dict().items()}
        state["transformer_blocks.1.attn1.to_q.weight"][0, 0] += change
        save_weights(state, model.config, tmp_path / name, torch.float32)
        prints.append(WeightFiles(tmp_path / name).fingerprint())
    assert len(set(prints)) == 4
    save_weights(model.state_dict(), model.config, tmp_path / "c", torch.float32, max_shard_bytes=20_000)
    assert WeightFiles(tmp_path / "c").fingerprint() == prints[2], "the cut into files does not matter"


# --------------------------------------------------------------------------------------------------- random numbers


def test_dropout_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    assert tiny_run.config().model.arch is not None
    shape = replace(tiny_run.model(tiny_run.config()).config, dropout=0.2)
    save_weights(tiny_run.model(tiny_run.config()).state_dict(), shape, tmp_path / "weights", torch.float32)

    def settings(name: str, steps: int) -> Config:
        tree = tiny_run.config(tmp_path / name, steps=steps, activation_checkpointing="full").model_dump()
        tree["model"] = {"weights": {"id": str(tmp_path / "weights")}, "arch": None}
        return Config.model_validate(tree)

    train(settings("whole", 4))
    train(settings("parts", 2))
    torch.rand(7)
    train(settings("parts", 4), resume="auto")
    whole, parts = (tmp_path / name / "checkpoints/step-00000004" for name in ("whole", "parts"))
    assert files(whole) == files(parts)
    plain = tiny_run.config(tmp_path / "plain", steps=4, activation_checkpointing="full")
    train(plain)
    assert files(tmp_path / "plain/checkpoints/step-00000004") != files(whole), "dropout is really on"


def test_generators_are_seeded_by_step_and_part_of_the_batch() -> None:
    settings = tiny_run.task(tiny_run.config()).first_state
    seeds = {generator_seed(settings, step, part) for step in range(4) for part in range(4)}
    assert len(seeds) == 16
    assert generator_seed(settings, 1, 0) != generator_seed(replace(settings, seed=1), 1, 0)
    digest = hashlib.blake2b(f"{settings.seed}/{settings.phase}/3/2".encode(), digest_size=8).digest()
    assert generator_seed(settings, 3, 2) == int.from_bytes(digest, "little") >> 1, "the same in every version"


# ------------------------------------------------------------------------------------------------------------- kept


def test_every_nth_is_kept_for_ever(tmp_path: Path) -> None:
    train(tiny_run.config(tmp_path / "run", steps=8, save_every=1, keep_checkpoints=2, keep_every=3))
    assert names(tmp_path / "run") == [f"step-{step:08d}" for step in (3, 6, 7, 8)]


def looked_at(run: Path, losses: dict[int, dict[str, Any]]) -> None:
    """Append rows of validations, by step, to the journal of a run."""
    rows = [{"event": "validation", "step": step, "snapshot": "a", **row} for step, row in losses.items()]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("losses", "older"),
    [
        ({1: {"loss": 0.3}, 2: {"loss": 0.1}, 4: {"loss": 0.2}}, [2]),
        ({1: {"loss": None}, 2: {"loss": 0.3}, 3: {"loss": 0.3}}, [2]),  # not finite; equal
        ({1: {"loss": 0.1, "ema_loss": 0.3}, 3: {"loss": 0.2, "ema_loss": 0.2}}, [1, 3]),
        ({1: {"loss": 0.1, "snapshot": "b"}, 2: {"loss": 0.5}, 3: {"loss": 0.4}}, [1, 3]),
        ({0: {"loss": 0.1}, 2: {"loss": 0.3}, 6: {"loss": 0.2}}, []),  # step 0 has no checkpoint, 6 is among the newest
        ({}, []),
    ],
)
def test_the_checkpoints_with_the_lowest_heldout_loss_are_never_removed(
    losses: dict[int, dict[str, Any]], older: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def touch(step: int) -> Batch | None:
        if step == 1:
            looked_at(run, losses)
        return None

    monkeypatch.setattr(checkpoint, "IN_BACKGROUND", False)
    train(tiny_run.config(run, steps=6, save_every=1, keep_checkpoints=2), touch=touch)
    assert names(run) == [f"step-{step:08d}" for step in (*older, 5, 6)]


def test_nothing_is_removed_while_the_losses_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise UserError("metrics.jsonl: cannot be read")

    monkeypatch.setattr(checkpoint.heldout, "read_events", broken)
    monkeypatch.setattr(checkpoint, "IN_BACKGROUND", False)
    train(tiny_run.config(tmp_path / "run", steps=4, save_every=1, keep_checkpoints=1))
    assert len(names(tmp_path / "run")) == 4


def test_the_best_is_that_of_a_run_and_its_newest_validation_set(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_run.config(run)
    for step in (2, 4, 6):
        checkpoint.folder_of(run / "checkpoints", step).mkdir(parents=True)
    for given in ({"run": "auto"}, {"run": str(run)}, {"run": "auto", "ema": True}):
        with pytest.raises(ConfigError, match=naming("--best", str(run))):
            checkpoint.find_best(config.train.output, **given)  # type: ignore[arg-type]
    looked_at(run, {2: {"loss": 0.1, "snapshot": "b"}, 3: {"loss": 0.1}, 4: {"loss": 0.2, "ema_loss": 0.4}})
    looked_at(run, {6: {"loss": 0.3, "ema_loss": 0.3}, 8: {"loss": 0.1}})
    for place in ("auto", str(run)):
        assert checkpoint.find_best(config.train.output, place) == (run / "checkpoints/step-00000004", 0.2)
        assert checkpoint.find_best(config.train.output, place, ema=True) == (run / "checkpoints/step-00000006", 0.3)
    for place in (run / "checkpoints/step-00000004", tmp_path / "none", run / "checkpoints"):
        with pytest.raises(ConfigError, match=naming(str(place))):
            checkpoint.find_best(config.train.output, str(place))
    with (run / "metrics.jsonl").open("a") as file:  # a resume drops what an earlier attempt measured after its start
        file.write(json.dumps({"event": "start", "step": 2}) + "\n")
    assert checkpoint.find_best(config.train.output, "auto") == (run / "checkpoints/step-00000002", 0.1)


def test_a_step_that_is_never_saved_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match=r"keep_every.*750.*save_every.*500"):
        tiny_run.config(save_every=500, keep_every=750)


def test_a_run_that_begins_anew_says_in_which_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relative path looks right in every folder."""
    monkeypatch.chdir(tmp_path)
    resumed, (note,) = checkpoint.choose(Path("runs/round1"), "auto", None)
    assert resumed is None and str(tmp_path / "runs" / "round1") in note
