"""Options of the whole suite."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from filelock import FileLock
from PIL import Image

from sana_pipe.config import Config, load
from tests.support.forked import lose_permissions

# Two threads sum in another order on a busy machine, and encoders then give other bits. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job ignores it, and so would our children
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so does `nohup`
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# On a busy machine an example may take seconds: time is no reason to fail.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


IN_MEMORY, ROOM = Path("/dev/shm"), 8 * 2**30
"""A file system in memory, and the bytes that must be free there: what the tests write, several times over."""


NARROW = ("model.arch.num_attention_heads=4", "model.arch.num_cross_attention_heads=2")
"""Half as wide as the tiny configuration."""


LONGEST = """
    readme recipes strategies dist_pipeline run dist_training seams model_checking readme_blocks config_heads engines
    encode_faults memory_modes dist_optimizers checkpoint_processes pack_objects gpu_kit controlnet_samples planning
    process_end elastic_faults planned_runs objects nvlabs_numerics compiled optimizers round_chains rounds training
    export_sample encode activation encode_sources training_pictures stranger kernels controls_and_masks bucket
    hostile_pictures gc scan
"""
"""Subjects of the files that take longest. They are begun first, so that no process waits for another at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Tests write where nothing waits for a disk, if there is room."""
    config.option.loadscopereorder = False  # xdist would begin with the files of most tests
    if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free >= ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-seeds", type=int, default=2, metavar="N", help="how many seeds each `fault_seed` test runs with"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{subject}.py": place for place, subject in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `fault_seed` runs once for each of `--fault-seeds` seeds."""
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--fault-seeds")))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long bytes, a made picture for example, may differ between the processes of a run; names of tests must not."""
    return argname if isinstance(val, bytes) and len(val) > 32 else None


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random values of a test do not depend on the tests before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """Graphs of a test do not count against dynamo's limit in the tests after it."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`made_once(name, make)`: a folder filled by `make(folder)` in one of the processes that share the tests."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        with FileLock(base / f"{name}.lock"):
            if not (base / f"{name}.made").exists():
                make(base / name)
                (base / f"{name}.made").touch()
        return base / name

    return folder


@pytest.fixture(scope="session")
def tiny_repo(made_once: Callable[..., Path]) -> Path:
    """Small unfitted real models: a folder with vae/, text_encoder/, tokenizer/, scheduler/. Do not write into it."""
    from tests.support import tiny_models

    return made_once("tiny", tiny_models.build)


@pytest.fixture(scope="session")
def photos(made_once: Callable[..., Path]) -> Path:
    """The demonstration's twelve photographs with captions. Do not write into it: copy it."""
    from sana_pipe.tools.demo import photographs

    return made_once("photos", photographs.demo_photos)


@pytest.fixture(scope="session")
def make_config(tiny_repo: Path) -> Callable[..., Config]:
    """`make_config(folder, "a.b=c", ...)`: two narrow blocks of the tiny configuration, in `folder`."""

    def make(folder: Path, *overrides: str) -> Config:
        own = [f"cache={folder / 'cache'}", f"train.output={folder / 'run'}"]
        models = [f"vae.id={tiny_repo}", f"text.id={tiny_repo}", "model.arch.num_layers=2", *NARROW]
        return load("tiny", [*models, *own, *overrides])

    return make


@pytest.fixture(scope="session")
def small_cache(photos: Path, make_config: Callable[..., Config], made_once: Callable[..., Path]) -> Path:
    """A cache of the photographs with a snapshot. Do not write into it: take `small_cache_copy`."""
    import sana_pipe.stages.bucket
    import sana_pipe.stages.encode

    def make(folder: Path) -> None:
        config = make_config(folder)
        sana_pipe.stages.encode.run(config, data=str(photos))
        sana_pipe.stages.bucket.run(config)

    return made_once("small", make) / "cache"


@pytest.fixture(autouse=True)
def pixel_limit() -> Iterator[None]:
    """The limit is Pillow's, and thus the whole process's: what a test sets is not for the next one."""
    before = Image.MAX_IMAGE_PIXELS
    yield
    Image.MAX_IMAGE_PIXELS = before


@pytest.fixture
def bound_by_permissions(tmp_path: Path) -> Callable[[], None]:
    """For `preexec_fn` of `subprocess` and `before` of `Forked`: root loses what lets it write where bits forbid it."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    if not subprocess.run(["touch", str(folder / "x")], preexec_fn=lose_permissions, capture_output=True).returncode:
        pytest.skip("permission bits bind no process here")
    return lose_permissions


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """An empty bucket on an S3 server on loopback; the environment of this and of started processes names it."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    import fsspec

    _one_put_at_a_time()
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


def _one_put_at_a_time() -> None:
    """S3 decides a conditional put at once. moto looks first and stores later: two of its threads could both store."""
    from moto.s3.responses import S3Response

    lock = threading.Lock()

    def alone(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            with lock:
                return method(*arguments)

        return wrapped

    for name in ("put_object", "_key_response_post"):
        setattr(S3Response, name, alone(getattr(S3Response, name)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_cache_copy(small_cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_cache, tmp_path / "cache"))


def pytest_collection_finish() -> None:
    """What is imported stays: without it, each collection of garbage is many times shorter."""
    gc.collect()
    gc.freeze()
