"""`sana-pipe run`: the single commands as one chain; what it prints and passes on, how it ends, what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sana_pipe.base.errors import UserError
from sana_pipe.base.processes import command, free_memory
from sana_pipe.config import Config, dump, load_given, option_fields, reads
from sana_pipe.stages import run as stage
from sana_pipe.stages.run import STAGES
from tests.support.forked import Forked, succeed
from tests.support.launched import children
from tests.support.runs import same_checkpoints
from tests.support.waiting import until
from tests.support.workers import tiny_run


def lines(
    *overrides: str, path: str | None = "tiny", data: tuple[str, ...] = ("a b",), prompts: Any = None
) -> list[str]:
    config, given = load_given(path, overrides)
    return [str(step) for step in stage.chain(config, given, path, overrides, data, prompts)]


def test_the_chain_is_the_single_commands_ready_to_paste() -> None:
    assert lines() == [
        "sana-pipe encode --data 'a b' --config tiny",
        "sana-pipe bucket --config tiny",
        "sana-pipe train --resume auto --config tiny",
        "sana-pipe sample --out runs/tiny/samples --config tiny",
        "sana-pipe export --out runs/tiny/export --overwrite --config tiny",
    ]


def test_a_setting_goes_to_the_commands_that_read_it() -> None:
    made = lines("train.steps=7", "cache=/c", "bucket.batch=3", "metrics.textfile=/z", data=("a", "b"))
    assert [("steps=7" in line, "/c" in line, "batch=3" in line, "/z" in line) for line in made] == [
        *[(False, True, False, True)] * 2,  # encode
        (False, True, True, False),
        *((True, True, False, True), (True, True, False, False), (True, True, False, False)),
    ]
    made = lines("data={resolution: 64, caption_prefix: 'x, '}")  # a section, of which some read a part
    assert [line.count("data=") + line.count("prefix") for line in made] == [2, 1, 2, 2, 2]
    assert made[1].endswith("""--set 'data={"resolution": 64}'""")
    unread = [name for name, _ in option_fields() if not any(reads(each, name) for each in stage.STAGES)]
    assert unread == [], "a --set that no command of the chain reads would be lost"


def test_credentials_are_not_printed() -> None:
    said = "\n".join(
        lines("cache=https://ann:sesame@h/c?sig=sesame", data=("s3://key:sesame@b/x", "https://h/x?t=sesame#f"))
    )
    assert "sesame" not in said and "--data s3://b/x" in said
    step = stage.Step(("encode", "--data", "s3://key:sesame@b/x"))
    assert "s3://key:sesame@b/x" in step.arguments, "the command itself has them"


@pytest.mark.parametrize("option", ["model.weights", "vae", "text", "train.adapter.start"])
def test_results_never_lie_over_what_the_configuration_reads(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "call", lambda arguments: pytest.fail("began"))
    (tmp_path / "run/export/transformer").mkdir(parents=True)
    for place in ("run/export", "run/export/transformer"):
        value = {"model.weights": "{{id: {}}}", "train.adapter.start": "{}"}.get(option, "{}").format(tmp_path / place)
        setting = f"{option}={value}" if option not in ("vae", "text") else f"{option}.id={value}"
        settings = [f"train.output={tmp_path}/run", setting, *["model.arch=null"] * option.startswith("model")]
        config, given = load_given("tiny", settings)
        with pytest.raises(UserError, match=r"train\.output"):
            stage.run(config, given, None, settings, ["photos"], None)


def test_prompts_are_encoded_where_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = "train.pictures={every: 5}"
    assert not any("--prompts" in line for line in lines(data=("a", "b")))
    assert not any("--prompts" in line for line in lines(drawn)), "captions of the snapshot are drawn"
    (tmp_path / "prompts.txt").write_text("a dog\n")
    first, last, *_ = lines(drawn, data=("a", "b"))
    assert "--prompts" not in first and " --data b --prompts prompts.txt " in last
    assert " --prompts prompts.txt " in lines(drawn)[0]
    assert " --prompts mine.txt " in lines(drawn, prompts="mine.txt")[0]
    assert "--prompts" not in lines("train.pictures={every: 5, prompts: mine}")[0]


def test_several_gpus_are_launched_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    torchrun = "torchrun --standalone --nproc-per-node 4 --no-python "
    made = lines("train.device=auto", "encode.device=cuda", path="sana_600m_512")
    assert [line.startswith(torchrun) for line in made] == [True, False, True, False, False]
    assert made[2] == f"{torchrun}sana-pipe train --resume auto --config sana_600m_512 --set train.device=auto"
    assert not any("torchrun" in line for line in lines()), "the tiny configuration asks for the CPU"
    arguments = stage.Step(("train",), 4).arguments
    assert arguments[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert arguments[-6:] == ["--no-python", *command("--quiet", "train")][-6:] and "--no-python" in arguments


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the chain with Python programs in place of the commands, by name; others end with 0."""

    def run(**programs: str) -> int:
        monkeypatch.setattr(stage, "command", lambda quiet, name, *_: [sys.executable, "-c", programs.get(name, "")])
        config, given = load_given("tiny")
        return stage.run(config, given, None, (), ["photos"], None)

    return run


def started(said: str) -> list[str]:
    return [line.split()[3] for line in said.splitlines() if line.startswith("[")]


def test_it_ends_with_the_code_of_the_first_command_that_fails(
    scripted: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripted(bucket="raise SystemExit(5)", train="raise SystemExit(7)") == 5
    said = capsys.readouterr()
    assert started(said.out) == ["encode", "bucket"]
    assert "sana-pipe bucket ended with exit code 5" in said.err
    assert scripted(encode="import os; os.kill(os.getpid(), 9)") == 128 + 9
    assert scripted() == 0
    assert started(capsys.readouterr().out)[-5:] == list(STAGES)


def test_the_checkpoint_with_the_lowest_heldout_loss_is_named(tmp_path: Path) -> None:
    assert stage.best(tmp_path) == []
    losses = {2: 0.5, 4: 0.1, 6: 0.3, 8: 0.4}  # of the checkpoint of step 4 nothing is left
    rows = [{"event": "validation", "step": step, "loss": loss} for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (2, 6, 8):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    for step in (4, 8):
        (tmp_path / f"pictures/step-{step:08d}").mkdir(parents=True)
        (tmp_path / f"pictures/step-{step:08d}.safetensors").touch()
    checkpoint, pictures = stage.best(tmp_path)
    assert "0.3000" in checkpoint and str(tmp_path / "checkpoints/step-00000006") in checkpoint
    assert str(tmp_path / "pictures/step-00000004") in pictures


WATCH = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: [pathlib.Path({file!r} + ".ended").touch(), exit(0)])
pathlib.Path({file!r}).write_text(" ".join(sys.argv[1:]))
time.sleep(60)
"""
TRAIN = """
import pathlib, time
while not pathlib.Path({file!r}).exists():
    time.sleep(0.01)
{then}
"""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The chain with programs for training and its watcher; pictures are drawn, of a side of so many pixels."""

    def run(watch: str, train: str, *settings: str) -> int:
        def program(quiet: str, name: str, *words: str) -> list[str]:
            said = watch if "--watch" in words else {"train": train}.get(name, "")
            return [sys.executable, "-c", said.replace("{file!r}", repr(str(tmp_path / "watched"))), name, *words]

        monkeypatch.setattr(stage, "command", program)
        given = [f"train.output={tmp_path / 'run'}", "train.pictures={every: 5}", *settings]
        config, known = load_given("tiny", given)
        return stage.run(config, known, None, given, ["photos"], None)

    return run


@pytest.mark.parametrize("code", [0, 7])
def test_pictures_are_decoded_while_it_trains_and_no_longer(
    code: int, watched: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert watched(WATCH, TRAIN.replace("{then}", f"raise SystemExit({code})")) == code
    words = (tmp_path / "watched").read_text().split()
    assert words[:3] == ["sample", "--watch", str(tmp_path / "run")] and words[-2:] == ["--set", "encode.device=cpu"]
    assert (tmp_path / "watched.ended").exists(), "it ends with the training, however that ends"
    assert "not decoded" not in capfd.readouterr().err


def test_a_watcher_that_fails_is_one_line_and_the_chain_goes_on(
    watched: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    failing = "import pathlib, sys; pathlib.Path({file!r}).touch(); sys.exit('no VAE there\\nmore\\nand more')"
    assert watched(failing, TRAIN.replace("{then}", "time.sleep(1)")) == 0
    said = capfd.readouterr()
    assert said.err.splitlines() == [line for line in said.err.splitlines() if "no VAE there" in line]
    assert len(said.err.splitlines()) == 1 and started(said.out) == list(STAGES)


@pytest.mark.parametrize("settings", [["train.pictures=null"], []])
def test_nothing_is_watched_without_pictures_or_memory(
    settings: list[str], watched: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not settings:
        monkeypatch.setattr(stage, "free_memory", lambda: 1 << 30)
    assert watched(WATCH, "", *settings) == 0
    assert not (tmp_path / "watched").exists()


def test_the_free_memory_is_some(tmp_path: Path) -> None:
    assert 1 << 20 < free_memory() < 1 << 50


WAITING = "import pathlib, signal, time; {handler}; pathlib.Path({file!r}).touch(); time.sleep(60)"


@pytest.mark.parametrize(
    ("number", "handler", "code"),
    [
        (signal.SIGINT, "pass", 130),
        (signal.SIGTERM, "pass", 128 + signal.SIGTERM),
        (signal.SIGUSR1, "signal.signal(signal.SIGUSR1, lambda *_: exit(0))", 0),
    ],
)
def test_signals_reach_the_command_and_end_the_chain(
    number: int,
    handler: str,
    code: int,
    scripted: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where the command ends with 0, as `encode` does after a signal: the next one would work on half of it."""
    file = tmp_path / "ready"

    def send() -> None:
        until(file.exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert scripted(encode=WAITING.format(handler=handler, file=str(file))) == code
    thread.join()
    said = capsys.readouterr()
    assert started(said.out) == ["encode"] and signal.Signals(number).name in said.err


def begun(folder: Path, photos: Path, log: str) -> subprocess.Popen[bytes]:
    with (folder / log).open("w") as out:
        return subprocess.Popen(
            command("run", str(photos)), env=tiny_run.environ(), cwd=folder, stdout=out, stderr=subprocess.STDOUT
        )


def prepared(folder: Path, make_config: Callable[..., Config]) -> Path:
    folder.mkdir()
    quick = ["train.steps=30", "train.save_every=2", "train.log_every=1", "train.microbatch=4"]
    config = make_config(folder, *quick, "bucket.batch=4", "train.optim.warmup_steps=2", "train.pictures={every: 30}")
    (folder / "sana-pipe.yaml").write_text(dump(config))
    return folder


def ended(process: subprocess.Popen[bytes], log: Path) -> str:
    assert process.wait(500) == 0, log.read_text()
    return log.read_text()


@pytest.mark.fault
@pytest.mark.timeout(1500)
def test_a_chain_that_is_killed_twice_ends_as_one_that_was_not(
    tmp_path: Path, photos: Path, make_config: Callable[..., Config]
) -> None:
    """Killed with SIGKILL while it encodes and while it trains; each time started again at once. The other is its
    commands by themselves."""
    calm, killed = (prepared(tmp_path / name, make_config) for name in ("calm", "killed"))
    last = Path("run/checkpoints/step-00000030")
    for number, sign in enumerate(("captions: ", "saved "), 1):
        process, log = begun(killed, photos, f"log{number}"), killed / f"log{number}"
        until(lambda log=log, sign=sign: sign in log.read_text(), 300)  # type: ignore[misc]
        begun_by = children(process.pid)  # the command, and alongside a training what decodes its pictures
        process.kill()
        process.wait()
        until(lambda every=begun_by: not any(Path(f"/proc/{child}/exe").exists() for child in every), 10)  # type: ignore[misc]
    assert not (killed / last).exists()
    said = ended(begun(killed, photos, "log3"), killed / "log3")
    assert "continuing" in said or "resum" in said, said
    assert started(said) == list(STAGES)
    for words in (["encode", "--data", str(photos)], ["bucket"], ["train"]):
        succeed([Forked(*words, before=partial(os.chdir, calm))], 300)
    assert same_checkpoints(calm / last, killed / last)
    assert (killed / "run/samples/contact_sheet.png").is_file() and (killed / "run/export/model_index.json").is_file()

    before = (killed / last).stat().st_mtime_ns
    again = ended(begun(killed, photos, "log4"), killed / "log4")
    assert "nothing to do" in again and (killed / last).stat().st_mtime_ns == before


@pytest.mark.nightly  # the signal: `test_signals_reach_the_command_and_end_the_chain`; what goes on: the test before
@pytest.mark.timeout(1200)
def test_ctrl_c_saves_and_the_same_command_goes_on(
    tmp_path: Path, photos: Path, make_config: Callable[..., Config]
) -> None:
    folder = prepared(tmp_path / "run", make_config)
    process = begun(folder, photos, "log")
    until(lambda: "saved " in (folder / "log").read_text(), 300)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    said = (folder / "log").read_text()
    assert "SIGINT: a checkpoint will be written" in said and "was ended by SIGINT" in said and "Traceback" not in said
    assert started(ended(begun(folder, photos, "log2"), folder / "log2")) == list(STAGES)
