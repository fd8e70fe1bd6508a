"""How processes end: with their exit code, whatever native threads are still doing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sana_pipe.base import processes
from sana_pipe.base.errors import UserError
from sana_pipe.config import Config
from sana_pipe.data.cache.arrow import ParquetFile, parquet_batches

ROOT = Path(__file__).resolve().parent.parent
READING_AT_THE_END = """
import io, sys, threading, time
import pyarrow as pa, pyarrow.parquet as pq
from sana_pipe.base.processes import run_and_exit

entered = threading.Event()

class Slow(io.BytesIO):
    def read(self, *args):
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            time.sleep(0.3)
        return super().read(*args)

def main():
    file = Slow()
    pq.write_table(pa.table({"a": list(range(4000))}), file, row_group_size=1000)
    source = pq.ParquetFile(file, pre_buffer=True)
    batches = source.iter_batches(1000)
    threading.Thread(target=next, args=(batches,), daemon=True).start()
    assert entered.wait(20)
    print("done")
    sys.exit(5)

END
"""


def buffered() -> dict[str, str]:
    """The environment, without the variable that makes Python write at once."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def child(code: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code]
    return subprocess.run(start, capture_output=True, text=True, timeout=60, check=False, env=buffered())


def test_a_native_thread_that_still_reads_changes_neither_output_nor_exit_code() -> None:
    ended = child(READING_AT_THE_END.replace("END", "run_and_exit(main)"))
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "done\n", "")


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_takes_the_place_of_a_process_that_ended_well(code: int) -> None:
    words = """
import os, sys
from sana_pipe.base import processes

def main():
    print("before", os.getpid())
    processes.follow_with("finish")
    return CODE

processes.command = lambda *words: [sys.executable, "-c", "import os, sys; print(sys.argv[1], os.getpid())", *words]
processes.run_and_exit(main)
"""
    words = words.replace("processes.command =", "command = processes.command\nprocesses.command =")
    ended = child(words.replace("CODE", str(code)))
    before, *after = ended.stdout.splitlines()
    assert ended.returncode == code
    assert after == ([before.replace("before", "finish")] if code == 0 else [])


def test_the_installed_command_shows_no_warnings_of_libraries_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import logging, warnings
from sana_pipe import cli

def main():
    warnings.warn("deprecated")
    logging.getLogger("torchao").warning("Failed to load")
    logging.getLogger("torchao").error("damaged")

cli.main = main
cli.console()
"""
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    assert child(code).stderr == "damaged\n"
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    said = child(code).stderr
    assert "deprecated" in said and "Failed to load" in said


def test_the_installed_command_ends_so_too() -> None:
    ended = child(READING_AT_THE_END.replace("END", "from sana_pipe import cli\ncli.main = main\ncli.console()"))
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "done\n", "")


def test_every_program_ends_by_the_helper() -> None:
    """But `benchmarks/__main__.py`, which has no native threads: it starts processes and waits for them."""
    programs = {
        path.relative_to(ROOT).as_posix(): text.rpartition('if __name__ == "__main__":')[2].rstrip()
        for folder in ("pipeline", "stages", "benchmarks", "tests/support/workers")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if 'if __name__ == "__main__":' in (text := path.read_text(encoding="utf-8"))
    }
    assert len(programs) > 35
    ends = ("    run_and_exit(", "    console()")
    wrong = [path for path, code in programs.items() if not code.splitlines()[-1].startswith(ends)]
    assert wrong == ["benchmarks/__main__.py"]


def test_that_thread_would_end_an_interpreter_that_is_torn_down() -> None:
    """If this fails, Arrow or Python has changed and `run_and_exit` may no longer be needed."""
    ended = child(READING_AT_THE_END.replace("END", "main()"))
    assert ended.returncode < 0, ended


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return None", 0),
        ("return 3", 3),
        ("sys.exit()", 0),
        ("sys.exit('words')", 1),
        ("raise ValueError('words')", processes.DEFECT),
    ],
)
def test_the_exit_code_is_that_of_main(body: str, code: int) -> None:
    ended = child(
        f"import sys\nfrom sana_pipe.base.processes import run_and_exit\ndef main():\n {body}\nrun_and_exit(main)"
    )
    assert ended.returncode == code
    assert ("words" in ended.stderr) == (code in (1, processes.DEFECT))


def test_threads_are_joined_exit_functions_run_and_output_flushed() -> None:
    ended = child("""
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from sana_pipe.base.processes import run_and_exit

def late(text):
    time.sleep(0.2)
    sys.stdout.write(text + chr(10))  # at once; print writes the end of the line apart

def main():
    atexit.register(print, "exit function")
    threading.Thread(target=late, args=("thread",)).start()
    ThreadPoolExecutor(1).submit(late, "pool")

run_and_exit(main)
""")
    assert ended.returncode == 0
    assert sorted(ended.stdout.split("\n")[:2]) == ["pool", "thread"]
    assert ended.stdout.split("\n")[2] == "exit function"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_without_an_end_is_written_too(stream: str) -> None:
    main = f"lambda: sys.{stream}.write('half') and None"
    ended = child(f"import sys\nfrom sana_pipe.base.processes import run_and_exit\nrun_and_exit({main})")
    assert (ended.returncode, getattr(ended, stream)) == (0, "half")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_no_success() -> None:
    for returned, code in ((None, processes.OUTPUT_LOST), (0, processes.OUTPUT_LOST), (5, 5)):
        main = f"from sana_pipe.base.processes import run_and_exit\nrun_and_exit(lambda: print('lost') or {returned})"
        with open("/dev/full", "w") as full:
            ended = subprocess.run([sys.executable, "-c", main], stdout=full, timeout=60, check=False, env=buffered())
        assert ended.returncode == code


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("away", ["closed", "pipe", "/dev/full"])
def test_work_goes_on_when_its_lines_cannot_be_written(away: str, stream: str, tmp_path: Path) -> None:
    """As under `| head`, `>&-`, or with the log on a full disk."""
    if away.startswith("/") and not Path(away).exists():
        pytest.skip("needs /dev/full")
    main = f"""
import sys
from pathlib import Path
import click
from sana_pipe.base.processes import run_and_exit

def main():
    for number in range(3):
        print(number, file=sys.{stream}, flush=True)
        click.echo(number, err={stream == "stderr"})
    Path("done").touch()

run_and_exit(main)
"""
    number = {"stdout": 1, "stderr": 2}[stream]
    start = f"exec {number}>&-" if away == "closed" else "true"
    target = os.open(away if away.startswith("/") else os.devnull, os.O_WRONLY)
    if away == "pipe":
        os.close(target)
        reader, target = os.pipe()
        os.close(reader)
    try:
        ended = subprocess.run(
            ["bash", "-c", f'{start}; exec "$0" -c "$1"', sys.executable, main],
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: target},  # type: ignore[call-overload]
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    finally:
        os.close(target)
    assert (tmp_path / "done").exists()
    assert ended.returncode == (processes.OUTPUT_LOST if stream == "stdout" and away != "closed" else 0)


def test_a_character_that_the_terminal_lacks_is_escaped_and_loses_no_line() -> None:
    main = "print('caf\\xe9 \\udcff'); print('after')"
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from sana_pipe.base.processes import run_and_exit\nrun_and_exit(lambda: exec({main!r}))",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "caf\\xe9 \\udcff\nafter\n")


def test_what_a_terminal_would_obey_is_escaped_on_both_streams() -> None:
    """Captions, names and messages may hold it; a progress line on stderr returns to its beginning."""
    foreign = "\x1b]0;owned\x07 \x9b31m \u202e \u3000\u06f1\u200c\u06f2\t."
    main = f"import sys; print({foreign!r} + chr(13)); print({foreign!r} + chr(13), file=sys.stderr)"
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from sana_pipe.base.processes import run_and_exit\nrun_and_exit(lambda: exec({main!r}))",
        ],
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    safe = "\\x1b]0;owned\\x07 \\x9b31m \\u202e \u3000\u06f1\u200c\u06f2\t."
    assert ended.stdout.decode() == f"{safe}\\r\n"
    assert ended.stderr.decode() == f"{safe}\r\n"
    error = UserError(foreign, found=foreign, fix=foreign)
    assert not set("\x1b\x07\x9b\u202e\t") & set(str(error)) and error.what == foreign


class Watched(io.BytesIO):
    """Notes the threads that read."""

    threads: set[int]

    def read(self, size: int | None = -1, /) -> bytes:
        self.threads.add(threading.get_ident())
        return super().read(size)


READS: dict[str, Callable[[ParquetFile], object]] = {
    "row group": lambda file: file.read_row_group(1),
    "batches": lambda file: list(file.iter_batches(100)),
}


@pytest.mark.parametrize("how", READS)
def test_parquet_is_read_on_the_calling_thread_alone(how: str) -> None:
    table = pa.table({name: list(range(3000)) for name in "abcdef"})
    file = Watched()
    pq.write_table(table, file, row_group_size=1000)
    file.threads = set()
    READS[how](ParquetFile(file))
    assert file.threads == {threading.get_ident()}


def test_a_parquet_table_from_memory_is_the_one_that_was_written() -> None:
    table = pa.table({"a": [1, None, 3], "b": [[{"x": "y"}], [], None]})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    assert pa.concat_tables(parquet_batches(sink.getvalue())[1]).equals(table)


def test_pyarrows_own_ways_to_read_parquet_are_used_nowhere() -> None:
    home = ROOT / "pipeline/data/cache/arrow.py"
    for path in [*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("stages/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert path == home or not any(way in text for way in ("pq.read_table", "pq.ParquetFile", "pq.ParquetDataset"))
        assert path == home or ".ipc.open_" not in text


# ---------------------------------------------------------------- what a command shows

NOISE = """
import logging, warnings
from sana_pipe import cli
def noisy():
    import torchao.quantization  # tells of libraries that it could not load
    logging.getLogger("library").warning("a note")
    warnings.warn("a warning", DeprecationWarning)
    logging.getLogger("library").error("an error")
cli.main = noisy
cli.console()
"""


@pytest.mark.slow
def test_a_command_shows_no_notes_of_libraries_unless_python_was_asked_for_them() -> None:
    pytest.importorskip("torchao")
    assert child(NOISE).stderr == "an error\n"
    asked = subprocess.run([sys.executable, "-W", "default", "-c", NOISE], capture_output=True, text=True, check=True)
    assert {"a note", "an error"} < set(asked.stderr.splitlines()) and "a warning" in asked.stderr


# ---------------------------------------------------------------- commands on a busy machine


@pytest.fixture
def busy() -> Iterator[None]:
    """Keeps two cores busy with three processes; beside the other tests of `make long` with none."""
    count = 0 if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) > 2 else 3
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


@pytest.mark.fault
@pytest.mark.timeout(1800)
def test_short_commands_end_with_documented_codes_on_a_busy_machine(
    photos: Path, small_cache_copy: Path, make_config: Callable[..., Config], busy: None, fault_seed: int
) -> None:
    """Each command once in two seeds (`make fault`); `make fault-long` makes about 200 runs of each, and
    100 of `train` and `export`."""
    config = make_config(small_cache_copy.parent)
    output = ["--set", f"train.output={config.train.output}"]
    where = ["--config", "tiny", "--set", f"cache={config.cache}"]
    models = ["--set", f"vae.id={config.vae.id}", "--set", f"text.id={config.text.id}"]
    long = [
        ["train", *where, *output, "--set", "train.steps=2", "--set", "train.pictures=null"],
        ["export", "--config", "tiny", *output, *models, "--out", str(small_cache_copy.parent / "export")],
    ]
    commands = [
        ["check", "--config", "tiny", *models],
        ["report", *where, "--out", str(small_cache_copy.parent / "report.html")],
        ["inspect", *where],
        ["bucket", "--pack", *where],
        ["status", *where],
        ["snapshots", *where],
        ["gc", *where],
        ["verify", *where],
        ["bucket", *where],
        ["encode", *where, *models, "--data", str(photos)],
    ]
    few = [long, commands[:4], []][fault_seed % 3] + commands[4:]
    for turn in [few] if fault_seed < 5 else [long + commands, commands]:
        for arguments in turn:
            ended = subprocess.run(processes.command(*arguments), capture_output=True, text=True, check=False)
            assert ended.returncode == 0, f"{arguments}: {ended.returncode}\n{ended.stdout}{ended.stderr}"
