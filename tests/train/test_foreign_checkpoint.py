"""A checkpoint from somebody else: reading it runs nothing."""

from __future__ import annotations

import json
import pathlib
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from sana_pipe.base.disk import file_digest
from sana_pipe.base.launch import Launch
from sana_pipe.train.training import checkpoint, metadata_reader
from sana_pipe.train.training.metadata_reader import CheckpointError
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.messages import naming
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("foreign") / "run"
    settings = tiny_run.config(run, steps=1)
    fit(settings.train, tiny_run.task(settings), Launch(), log=lambda line: None)
    return run


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def _runs_code(found: Metadata, mark: Path) -> Any:
    found.planner_data = Calls(Path.touch, mark)
    return found


def _calls_torch(found: Metadata, mark: Path) -> Any:
    import torch

    found.planner_data = Calls(torch.save, {}, str(mark))
    return found


def _calls_what_torch_exports(found: Metadata, mark: Path) -> Any:
    import torch

    found.planner_data = Calls(torch.compiled_with_cxx11_abi)
    return found


def _is_something_else(found: Metadata, mark: Path) -> Any:
    return {"a": 1}


def _holds_an_object(found: Metadata, mark: Path) -> Any:
    """torch's planner would unpickle it from the data, without a check."""
    name = next(name for name in found.state_dict_metadata if name.startswith("model."))
    found.state_dict_metadata[name] = BytesStorageMetadata()
    return found


def _asks_for_an_attribute_of_a_class(found: Metadata, mark: Path) -> Any:
    found.planner_data = Calls(getattr, Metadata, "__init__")
    return found


def _asks_for_what_is_no_member(found: Metadata, mark: Path) -> Any:
    found.planner_data = Calls(getattr, _MEM_FORMAT_ENCODING, "__init__")
    return found


def _points_outside(found: Metadata, mark: Path) -> Any:
    next(iter(found.storage_data.values())).relative_path = "../secret"
    return found


def _is_the_folder_above(found: Metadata, mark: Path) -> Any:
    next(iter(found.storage_data.values())).relative_path = ".."
    return found


class _TwoFaced:
    """Pickles to a path that leads to `../secret` and keeps another text to show."""

    def __reduce__(self) -> Any:
        parts = "_raw_paths" if sys.version_info >= (3, 12) else "_parts"
        slots = {"_drv": "", "_root": "", parts: ["..", "secret"], "_str": "__0_0.distcp"}
        return pathlib.PosixPath, (), (None, slots)


def forge(folder: Path, change: Callable[[Metadata, Path], Any], mark: Path) -> None:
    """Replace `.metadata`, with a document that fits it."""
    path = folder / ".metadata"
    replace(path, pickle.dumps(change(pickle.loads(path.read_bytes()), mark)))


def replace(path: Path, data: bytes) -> None:
    """Replace a file of a checkpoint, with a document that fits it."""
    head = path.parent / checkpoint.DOCUMENT
    path.write_bytes(data)
    values = json.loads(head.read_text())
    del values["digest"]
    values["files"][path.name] = file_digest(path)
    head.write_text(json.dumps({**values, "digest": checkpoint.digest_of(values)}))


@pytest.mark.parametrize(
    "change",
    [
        _runs_code,
        _calls_torch,
        _calls_what_torch_exports,
        _is_something_else,
        _holds_an_object,
        _asks_for_an_attribute_of_a_class,
        _asks_for_what_is_no_member,
        _points_outside,
        _is_the_folder_above,
    ],
)
def test_metadata_that_is_more_than_a_list_of_tensors_is_refused(
    written: Path, tmp_path: Path, change: Callable[[Metadata, Path], Any]
) -> None:
    shutil.copytree(written, tmp_path / "run")
    folder, mark = tmp_path / "run/checkpoints/step-00000001", tmp_path / "touched"
    forge(folder, change, mark)
    with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata"):  # what export and sample read
        load_model_state(folder)
    settings = tiny_run.config(tmp_path / "run", steps=2)
    with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata"):
        fit(settings.train, tiny_run.task(settings), Launch(), resume="auto", log=lambda line: None)
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"\x80\xff", b"(K\x01.", b"\x8e" + b"\xff" * 8, b"cos\nsystem\n.", b"c\xff\n\n.", b"I1e\n.", b"N."],
)
def test_any_other_bytes_are_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata"):
        metadata_reader.read_metadata(tmp_path / ".metadata")


def test_the_file_that_is_read_is_the_one_that_was_looked_at(written: Path, tmp_path: Path) -> None:
    def hides_where_it_leads(found: Metadata, mark: Path) -> Any:
        next(iter(found.storage_data.values())).relative_path = _TwoFaced()  # type: ignore[assignment]
        return found

    shutil.copytree(written, tmp_path / "run")
    folder = tmp_path / "run/checkpoints/step-00000001"
    forge(folder, hides_where_it_leads, tmp_path)
    found = metadata_reader.read_metadata(folder / ".metadata")
    assert {type(info.relative_path) for info in found.storage_data.values()} == {str}
    assert load_model_state(folder)


@pytest.mark.parametrize("what", ["no place", "no tensors"])
def test_what_does_not_hold_the_tensors_is_refused_in_words(written: Path, tmp_path: Path, what: str) -> None:
    def has_no_places(found: Metadata, mark: Path) -> Any:
        found.storage_data = {}
        return found

    shutil.copytree(written, tmp_path / "run")
    folder, mark = tmp_path / "run/checkpoints/step-00000001", tmp_path / "touched"
    if what == "no place":
        forge(folder, has_no_places, mark)
    else:
        [path] = folder.glob("*.distcp")
        replace(path, pickle.dumps(Calls(Path.touch, mark), protocol=2).ljust(path.stat().st_size, b"."))
    with pytest.raises(checkpoint.CheckpointError, match="step-00000001"):
        load_model_state(folder)
    assert not mark.exists()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_checkpoints_go_from_one_python_to_another(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Python 3.13 alone names the class of paths by `pathlib._local`."""
    shutil.copytree(written, tmp_path / "run")
    folder = tmp_path / "run/checkpoints/step-00000001"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, pathlib)
        patch.setattr(pathlib.PosixPath, "__module__", module)
        forge(folder, lambda found, _: found, tmp_path)
    assert module.encode() + b"\x94\x8c\tPosixPath" in (folder / ".metadata").read_bytes()
    assert load_model_state(folder)[1]


def test_checkpoints_of_pythons_first_3_11_are_read(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 pickle a member of an enumeration as a call of `getattr`. Debian 12 has 3.11.2."""
    shutil.copytree(written, tmp_path / "run")
    folder = tmp_path / "run/checkpoints/step-00000001"
    with monkeypatch.context() as patch:
        patch.setattr(
            _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name))
        )
        forge(folder, lambda found, _: found, tmp_path)
    assert b"builtins\x94\x8c\x07getattr" in (folder / ".metadata").read_bytes()
    assert load_model_state(folder)[1]


@pytest.mark.parametrize("read", ["document", "bytes", "metadata", "tensors"])
def test_a_checkpoint_that_its_training_removes_meanwhile_is_not_a_foreign_one(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """Renamed, as `train.keep_checkpoints` begins to remove it."""
    root = tmp_path / "checkpoints"
    folder = Path(shutil.copytree(written / "checkpoints" / "step-00000001", root / "step-00000001"))
    shutil.copytree(folder, root / "step-00000002")
    gone = folder.with_name("step-00000001.abc.removing")
    if read == "bytes":
        document = checkpoint.read_document(folder)
        monkeypatch.setattr(checkpoint, "read_document", lambda path: document)
    if read == "metadata":
        monkeypatch.setattr(checkpoint, "verify", lambda *_: folder.rename(gone))
    if read == "tensors":
        weights = checkpoint.ModelTensors(folder)
    if read != "metadata":
        folder.rename(gone)
    with pytest.raises(CheckpointError, match=naming("step-00000002", "train.keep_checkpoints")) as caught:
        next(iter((weights if read == "tensors" else checkpoint.ModelTensors(folder)).values()))
    assert caught.value.fix != metadata_reader.FIX


def test_torchs_own_reader_is_used_nowhere() -> None:
    """It would unpickle anything. `source.py` and `metadata_files.py` read what the same process has written to a file
    without a name."""
    for folder in ("pipeline", "stages"):
        for path in (tiny_run.ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert path.name in ("metadata_reader.py", "source.py", "metadata_files.py") or not any(
                word in text for word in ("FileSystemReader", "pickle.load", ".Unpickler", "checkpoint_id=str(folder)")
            ), path
