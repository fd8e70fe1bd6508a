"""What a machine lacks: a full disk ends a command with 6, too little memory with a line, neither with a traceback."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from PIL import Image

from sana_pipe.base.disk import replacing
from sana_pipe.base.errors import NO_SPACE, NoSpaceError, PeerError, ResourceError, UserError, shown, writing
from sana_pipe.base.launch import Launch
from sana_pipe.data.loader.quarantine import Quarantine, UnreadableRecord
from sana_pipe.tools.planning import expectation
from sana_pipe.tools.planning.predict import Data
from sana_pipe.tools.reporting import encoder_process, page
from sana_pipe.train.models.sana_files import save_nvlabs, save_weights
from sana_pipe.train.parallel import collectives
from sana_pipe.train.training import checkpoint, lock, metrics
from sana_pipe.train.training.memory import memory_errors
from sana_pipe.train.training.metadata_reader import read_metadata
from tests.support.messages import naming
from tests.support.runs import fit_tiny
from tests.support.tiny_sana import TINY, make
from tests.support.workers import tiny_run

MUCH = torch.zeros(1 << 20, dtype=torch.uint8)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond `size`: every write there is EFBIG, whatever library does it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _torch(path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"a": MUCH}, file)


def _arrow(path: Path) -> None:
    table = pa.table({"a": MUCH.numpy()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _picture(path: Path) -> None:
    with replacing(path) as work:
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (500, 500, 3), np.uint8)).save(work, "PNG")


WRITERS: dict[str, Callable[[Path], Any]] = {
    "plain": lambda path: path.write_bytes(bytes(1 << 20)),
    "torch": _torch,
    "safetensors": lambda path: safetensors.torch.save_file({"a": MUCH}, path),
    "arrow": _arrow,
    "picture": _picture,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_known_whatever_library_meets_it(writer: str, tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError, match=naming(tmp_path / "out", "ulimit -f")) as caught, largest_file(1 << 12):
        with writing(tmp_path / "out", "another fix"):
            WRITERS[writer](tmp_path / "file")
    assert caught.value.exit_code == 6
    with pytest.raises(Exception) as raw, largest_file(1 << 12):
        WRITERS[writer](tmp_path / "other")
    assert isinstance(shown(raw.value), NoSpaceError), "also where nobody thought of it"


@pytest.mark.parametrize("number", NO_SPACE)
def test_each_kind_of_full_disk_has_its_fix(number: int, tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError, match=naming(tmp_path)) as caught, writing(tmp_path, "another fix"):
        raise OSError(number, os.strerror(number))
    assert str(caught.value.fix).startswith(NO_SPACE[number])
    assert type(pickle.loads(pickle.dumps(caught.value))) is NoSpaceError


def test_another_error_of_writing_keeps_its_own_kind_and_fix(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=naming(tmp_path)) as caught:
        with writing(tmp_path, "another fix", checkpoint.CheckpointError):
            raise PermissionError(errno.EACCES, "no", "x")
    assert caught.value.fix == "another fix"
    with pytest.raises(ZeroDivisionError), writing(tmp_path, "another fix"):
        raise ZeroDivisionError
    with pytest.raises(UserError, match=naming("as it was")), writing(tmp_path, "another fix"):
        raise UserError("as it was")


def _weights(save: Callable[..., None], *rest: Any) -> Callable[[Path], Any]:
    return lambda path: save(make(TINY).state_dict(), TINY, path, *rest, torch.float32)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(_weights(save_weights), id="diffusers"),
        pytest.param(_weights(save_nvlabs, "sana"), id="nvlabs"),
        pytest.param(lambda path: page.write("x" * (1 << 20), [], path / "page.html"), id="page"),
        pytest.param(
            lambda path: encoder_process.decode(tiny_run.config(path), {"a": torch.zeros(1, 512, 512)}, path),
            id="latents",
        ),
    ],
)
def test_results_that_do_not_fit_are_a_full_disk(write: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(Exception) as caught, largest_file(1 << 12):
        write(tmp_path)
    assert isinstance(shown(caught.value), NoSpaceError)


def test_a_full_disk_of_the_process_that_decodes_is_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, kind in ((6, NoSpaceError), (2, encoder_process.DecodeError)):
        monkeypatch.setattr(
            encoder_process.subprocess, "run", lambda *_, code=code, **__: SimpleNamespace(returncode=code)
        )
        with pytest.raises(kind):
            encoder_process.decode(tiny_run.config(tmp_path), {"a": torch.zeros(1)}, tmp_path)


def test_only_warnings_and_errors_of_an_encoder_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import sys; print('progress'); print('warning', file=sys.stderr)"
    monkeypatch.setattr(encoder_process, "command", lambda *words: [sys.executable, "-c", program])
    encoder_process.decode(tiny_run.config(tmp_path), {"a": torch.zeros(1)}, tmp_path)
    printed = capfd.readouterr()
    assert "progress" not in printed.out and "warning" in printed.err


def test_a_full_disk_of_one_process_is_one_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collectives, "all_gather_objects", lambda value, group: [None, value])
    with pytest.raises(NoSpaceError, match=naming("file")):
        collectives.raise_first_error(OSError(errno.ENOSPC, "full", "file"))


# ------------------------------------------------------------------------------------------------------ a training


def test_a_journal_that_cannot_be_written_ends_no_run_and_loses_no_row(tmp_path: Path) -> None:
    path, printed = tmp_path / "metrics.jsonl", list[str]()
    with closing(metrics.Metrics(path, printed.append)) as journal:
        journal.pictures(9, drawn(0))
        with largest_file(path.stat().st_size + 20):  # torn within a row
            for step in (1, 2, 3):
                journal.pictures(9, drawn(step))
        journal.pictures(9, drawn(4))
    assert [row["step"] for row in metrics.read_events(path)["pictures"]] == [0, 1, 2, 3, 4]
    (warning,) = (line for line in printed if "warning" in line)
    assert str(path) in warning


def drawn(step: int) -> dict[str, Any]:
    return {"step": step, "count": 1, "file": "pictures/x", "seconds": 1.0}


def test_rows_that_are_lost_in_the_end_are_counted(tmp_path: Path) -> None:
    path, printed = tmp_path / "metrics.jsonl", list[str]()
    journal = metrics.Metrics(path, printed.append)
    with largest_file(0):
        journal.pictures(9, drawn(1))
        journal.pictures(9, drawn(2))
        journal.close()
    assert "2 rows" in printed[-1]


def test_a_run_that_starts_on_a_full_disk_says_so(tmp_path: Path) -> None:
    for size in (0, 1 << 7):  # of the lock, of config.yaml
        with pytest.raises(NoSpaceError, match=naming("--resume auto")), largest_file(size):
            fit_tiny(tiny_run.config(tmp_path / "run", steps=1))
        assert not (tmp_path / "run" / lock.NAME).exists(), "it would hold up the next attempt"


def test_a_save_on_a_full_disk_leaves_no_part_there(tmp_path: Path) -> None:
    settings = tiny_run.config(tmp_path / "run", steps=1)
    with pytest.raises(NoSpaceError, match=naming("--resume auto")), largest_file(1 << 16):
        fit_tiny(settings)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert fit_tiny(settings, resume="auto").step == 1


def test_an_unwritable_list_of_bad_records_is_a_full_disk(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "bad.jsonl")
    with pytest.raises(NoSpaceError, match=naming(quarantine.path)), largest_file(0):
        quarantine.write([UnreadableRecord("shard", "record", 1, 2, 3, "reason")])


@pytest.mark.parametrize(
    ("room", "every", "said"), [(3.9, None, True), (4.1, None, False), (6.9, 2, True), (7.1, 2, False)]
)
def test_a_run_that_keeps_more_checkpoints_than_fit_says_so_first(
    room: float, every: int | None, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_run.config(tmp_path / "run", steps=1)
    fit_tiny(settings)
    written = tmp_path / "run/checkpoints/step-00000001"
    shape = checkpoint.read_document(written).architecture
    tensors = read_metadata(written / ".metadata").state_dict_metadata.values()
    size = sum(4 * entry.size.numel() for entry in tensors)
    changes = {"steps": 10, "save_every": 1, "keep_checkpoints": 3, "keep_every": every}
    settings = settings.with_train(output=str(tmp_path / "new"), **changes)
    monkeypatch.setattr(expectation, "free_at", lambda root: int(room * size))
    printed = list[str]()
    data = Data({(64, 64): 4}, None, 16)
    expectation.expect(settings.train, lambda: shape, data, torch.device("cpu"), Launch(), printed.append)
    assert any("train.keep_checkpoints" in line for line in printed) == said


# ---------------------------------------------------------------------------------------------------------- memory


def _allocate() -> Any:
    return torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        pa.lib.ArrowMemoryError("malloc of size 64 failed"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("GET was unable to find an engine to execute this computation"),  # cuDNN
        RuntimeError("FIND was unable to find an engine to execute this computation"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("can't start new thread"),
        RuntimeError("could not create a primitive"),
        ImportError("libfoo.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_known_by_any_name(error: Exception) -> None:
    known = shown(error)
    assert isinstance(known, ResourceError) and known.exit_code == 2 and known.fix


def test_what_torch_and_a_wrapped_error_say_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        _allocate()
    assert isinstance(shown(caught.value), ResourceError)
    with pytest.raises(UserError) as wrapped:
        try:
            _allocate()
        except RuntimeError:
            raise UserError("the file is damaged", fix="fetch it again") from None
    known = shown(wrapped.value)
    assert isinstance(known, ResourceError) and "the file is damaged" in known.what and "fetch" not in str(known.fix)


def test_the_advice_of_a_training_stays() -> None:
    with pytest.raises(ResourceError) as caught, memory_errors(tiny_run.config().train):
        _allocate()
    assert shown(caught.value) is caught.value


def test_other_errors_stay_as_they_are() -> None:
    for error in (ValueError("no"), RuntimeError("a defect"), OSError(errno.EIO, "x"), UserError("wrong")):
        assert shown(error) is error


def test_an_error_that_tells_of_a_lost_process_is_one_line() -> None:
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer\nException raised from ...")
    for error in (gloo, dist.DistError("x")):
        known = shown(error)
        assert isinstance(known, PeerError) and known.exit_code == 1 and "--resume auto" in str(known.fix)
        assert "Exception raised" not in str(known)
