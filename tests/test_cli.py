"""The command line: what it passes to the stages, error messages, exit codes, help and completion."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest

import sana_pipe
from sana_pipe.base import processes
from sana_pipe.base.errors import EXIT_CODES, CacheError, IntegrityError, NoSpaceError, UserError
from sana_pipe.cli import INTERRUPTED, cli, main
from sana_pipe.train.training.config import OptimConfig
from tests.support.command_lines import dry_run, words_of
from tests.support.import_graph import imports, module_name, nodes
from tests.support.messages import naming
from tests.support.waiting import until

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def end(*arguments: str) -> int:
    """The exit code of `sana-pipe ARGUMENTS`, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Calls]:
    """Replaces a stage by one that records its call (the real ones import torch)."""
    monkeypatch.chdir(tmp_path)

    def install(name: str, result: Any = 0, function: str = "run") -> Calls:
        calls: Calls = []

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result

        replacement = types.ModuleType(f"sana_pipe.stages.{name}")
        setattr(replacement, function, record)
        monkeypatch.setitem(sys.modules, f"sana_pipe.stages.{name}", replacement)
        monkeypatch.setattr(sys.modules["sana_pipe.stages"], name, replacement, raising=False)
        return calls

    import sana_pipe.stages  # noqa: F401 - the package has to be there to be patched

    return install


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        ("train --lr 1e-4", "--set train.optim.lr=1e-4"),
        ("train --lr=1e-4 --resume auto", "--set train.optim.lr=1e-4"),
        ("train --optim.lr 1e-4", "--set train.optim.lr=1e-4"),
        ("train --caption-drop 0.1", "--set train.caption_drop=0.1"),
        ("train --device cpu", "--set train.device=cpu or --set train.ema.device=cpu"),
        ("train --ema", "--set 'train.ema={}'"),
        ("train --tf32", "--set train.tf32=VALUE"),
        ("encode --data . --image-batch 3", "--set encode.image_batch=3"),
        ("gc --cache /c", "--set cache=/c"),
    ],
)
def test_an_unknown_option_that_ends_an_option_of_the_configuration_is_named(
    words: str, suggested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(*words.split()) == 2
    assert capsys.readouterr().err.strip().endswith(suggested)


@pytest.mark.parametrize("words", ["bucket --lr 1", "demo --steps 3", "train --bucket.sources.NAME.weight 3"])
def test_another_unknown_option_is_refused_without_a_suggestion(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(*words.split()) == 2
    printed = capsys.readouterr().err
    assert "No such option" in printed and "--set" not in printed


STOPPED = types.SimpleNamespace(stopped_by="SIGTERM")


@pytest.mark.parametrize(
    ("words", "result", "following"),
    [
        ("encode --data a --set 'cache=my cache' --set train.steps=3", {"left": 0}, None),
        ("encode --data a --set 'cache=my cache'", {"left": 0}, "bucket --set 'cache=my cache'"),
        ("encode --data a --set metrics.textfile=/d", {"left": 0}, "bucket"),
        ("encode --data a", {"left": 3}, None),
        ("encode --data a", {"stopped": "SIGTERM"}, None),
        ("encode --data a --json", {"left": 0}, None),
        ("encode --data 'a b' --dry-run --no-probe", 0, "encode --data 'a b'"),
        ("encode --prompts default", {"left": 0}, "train --resume auto"),
        ("bucket --config tiny", "id", "train --resume auto --config tiny"),
        ("bucket --dry-run --filter 'width > 3'", "id", "bucket --filter 'width > 3'"),
        ("bucket --pack --name p", "id", "train --resume auto --snapshot p"),
        ("bucket --pack --name p --latest", "id", "train --resume auto"),
        ("check", 0, "encode --data DIR"),
        ("check", 2, None),
        ("plan --set train.steps=3", 0, "train --resume auto --set train.steps=3"),
        (
            "train --set train.output=o --set data.resolution=512",
            None,
            "sample --set train.output=o --set data.resolution=512",
        ),
        ("train --resume c --snapshot s", STOPPED, "train --snapshot s --resume auto"),
        ("sample --ema --checkpoint c", None, "export --checkpoint c --ema"),
        ("sample --watch r --once", 0, "report --run r"),
        ("export", None, "report"),
        ("run a --set cache=c --set train.optim.lr=1", 0, "report --set cache=c --set train.optim.lr=1"),
        ("run a", 3, None),
        ("verify", 0, "bucket"),
        ("verify", 4, None),
        ("gc", 0, None),
        ("--quiet verify", 0, None),
    ],
)
def test_a_command_names_the_next_one_on_a_terminal(
    words: str,
    result: Any,
    following: str | None,
    stage: Callable[..., Calls],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sana_pipe.cli.pass_on", lambda *words: False)  # trainings of other tests may have a follower
    name = words.removeprefix("--quiet ").split()[0]
    function = "dry_run" if "encode" in words and "--dry-run" in words else "watch" if "--watch" in words else "run"
    stage(name, result, function)
    if name == "plan":
        vars(sys.modules["sana_pipe.stages.plan"])["Options"] = dict
    if "--pack" in words:
        stage("pack", result)
        vars(sys.modules["sana_pipe.stages.pack"])["check_name"] = lambda name: None
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda there=terminal: there)
        end(*shlex.split(words))
        printed = capsys.readouterr().out
        assert printed == (f"next: sana-pipe {following}\n" if terminal and following else "")


def test_the_line_about_the_next_command_ends_what_follows_a_training(
    stage: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed: list[tuple[str, ...]] = []
    monkeypatch.setattr("sana_pipe.cli.pass_on", lambda *words: passed.append(words) or True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    stage("train", None)
    assert end("train") == 0 and capsys.readouterr().out == ""
    assert passed == [("--next", "sana-pipe sample")]
    monkeypatch.setattr("sana_pipe.cli.pass_on", lambda *words: False)
    stage("report", 0, "finish")
    assert end("finish", "--run", "r", *passed[0]) == 0
    assert capsys.readouterr().out == "next: sana-pipe sample\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert end("--version") == 0
    assert capsys.readouterr().out == f"sana-pipe, version {sana_pipe.__version__}\n"


def test_help_names_every_command_but_the_hidden_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert end("--help") == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].partition("Examples:")[0]
    assert [line.split()[0] for line in listed.strip().splitlines()] == [
        "bucket",
        "check",
        "config",
        "demo",
        "encode",
        "export",
        "forget",
        "gc",
        "help",
        "init",
        "inspect",
        "plan",
        "pull",
        "push",
        "report",
        "run",
        "sample",
        "snapshots",
        "status",
        "train",
        "verify",
        "view",
    ]
    assert "decode" in cli.commands


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(command, "--help") == 0
    assert "Usage: sana-pipe " + command in capsys.readouterr().out


def _commands() -> dict[str, click.Command]:
    """Every command that help lists, with the words that call it."""
    subcommands = cli.commands["snapshots"].commands  # type: ignore[attr-defined]
    return {"": cli, **{name: c for name, c in cli.commands.items() if not c.hidden}} | {
        f"snapshots {name}": command for name, command in subcommands.items()
    }


@pytest.mark.parametrize("words", _commands())
def test_help_ends_with_examples_that_are_accepted(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert end(*words.split(), "--help") == 0
    examples = capsys.readouterr().out.partition("Examples:\n")[2].splitlines()
    assert examples and all(f"sana-pipe {words}".strip() in line for line in examples)
    for line in examples:
        code, calls = dry_run(monkeypatch, words_of(line))
        assert code == 0, capsys.readouterr().err
        assert calls or words in ("config", "help")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["tra"], {"train"}),
        (["snapshots", "di"], {"diff"}),
        (["train", "--quar"], {"--quarantine"}),
        (["train", "--config", "sana_6"], {"sana_600m_512", "sana_600m_512_scratch"}),
        (["train", "--set", "train.optim.b"], {"train.optim.betas="}),
        (["config", "train.opt"], {"train.optim", *(f"train.optim.{name}" for name in OptimConfig.model_fields)}),
    ],
)
def test_the_shell_completes(
    typed: list[str], offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SANA_PIPE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["sana-pipe", *typed]))
    monkeypatch.setenv("COMP_CWORD", str(len(typed)))
    end()
    answers = [line.split(",", 1) for line in capsys.readouterr().out.splitlines()]
    assert {value for kind, value in answers if kind == "plain"} == offered


def test_the_documented_line_sets_completion_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = 'eval "$(_SANA_PIPE_COMPLETE=bash_source sana-pipe)"'
    root = Path(sana_pipe.__file__).parent.parent
    assert line in (root / "README.md").read_text(encoding="utf-8")
    for shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv("_SANA_PIPE_COMPLETE", f"{shell}_source")
        assert end() == 0
        assert f"_SANA_PIPE_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_encode_takes_prompts_with_and_without_data(stage: Callable[..., Calls]) -> None:
    calls = stage("encode")
    assert end("encode", "--prompts", "default") == 0
    assert end("encode", "--data", "pics", "--prompts", "p.txt", "--prompts-name", "mine") == 0
    assert [(o["data"], o["prompts"], o["prompts_name"]) for _, o in calls] == [
        (None, "default", "prompts"),
        ("pics", "p.txt", "mine"),
    ]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--prompts", "p", "--rehash"],
        ["--prompts", "p", "--format", "folder"],
        ["--prompts", "p", "--source-name", "s"],
        ["--prompts", "p", "--data", "d", "--dry-run"],
        ["--data", "d", "--data", "e"],
        ["--data", "d", "--no-probe"],
    ],
)
def test_encode_refuses_options_that_do_not_go_together(stage: Callable[..., Calls], words: list[str]) -> None:
    calls = stage("encode")
    assert end("encode", *words) == 2 and not calls


def test_watch_takes_the_options_that_it_reads(stage: Callable[..., Calls]) -> None:
    calls = stage("sample", function="watch")
    assert end("sample", "--watch", "runs/a", "--once", "--set", "encode.device=cpu", "--set", "vae.dtype=bf16") == 0
    ((config, run), options) = calls[0]
    assert (run, options, config.vae.dtype) == (Path("runs/a"), {"once": True}, "bf16")
    for words in (["--count", "2"], ["--ema"], ["--checkpoint", "auto"]):
        assert end("sample", "--watch", "runs/a", *words) == 2
    assert end("sample", "--once") == 2 and len(calls) == 1


def test_no_option_of_plan_is_ignored(stage: Callable[..., Calls]) -> None:
    calls = stage("plan")
    assert end("plan", "--search", "--price", "2") == 2
    assert not calls


def test_prompts_are_drawn_instead_of_captions(stage: Callable[..., Calls]) -> None:
    calls = stage("sample", function="run_prompts")
    words = ["sample", "--prompt", "a cat", "--prompt", "a dog"]
    assert end(*words, "--ema", "--width", "512", "--set", "text.mode=exact", "--set", "sample.seed=3") == 0
    ((config, checkpoint, prompts, out), options) = calls[0]
    assert (checkpoint, prompts, out) == ("auto", ("a cat", "a dog"), None)
    shared = {"ema": True, "height": None, "width": 512, "scale": None, "base": True}
    assert options == {**shared, "control": None} and config.text.mode == "exact"
    assert end(*words, "--control", "edges.png") == 0 and calls.pop()[1]["control"] == Path("edges.png")
    assert end("sample", "--control", "edges.png") == 2
    assert end(*words, "--control", "edges.png", "--control", "other.png") == 2
    assert end(*words, "--count", "2") == 2 and end(*words, "--snapshot", "x") == 2
    assert end("sample", "--width", "512") == 2 and end(*words, "--watch", "run") == 2 and len(calls) == 1


def test_encode_passes_its_options(stage: Callable[..., Calls]) -> None:
    calls = stage("encode")
    assert end("encode", "--data", "pics", "--set", "encode.image_batch=3", "--set", "cache=/c") == 0
    assert (
        end(
            "encode",
            "--data",
            "pics",
            "--source-name=n",
            "--rehash",
            "--task-index=1",
            "--task-count=4",
        )
        == 0
    )
    (first, options), (_, named) = calls
    assert first[0].encode.image_batch == 3
    assert first[0].cache == "/c"
    assert options == {
        "data": "pics",
        "source_name": None,
        "rehash": False,
        "task_index": None,
        "task_count": None,
        "format": None,
        "engine": "local",
        "as_json": False,
    }
    assert named == {
        "data": "pics",
        "source_name": "n",
        "rehash": True,
        "task_index": 1,
        "task_count": 4,
        "format": None,
        "engine": "local",
        "as_json": False,
    }


def test_a_dry_run_is_another_call(stage: Callable[..., Calls]) -> None:
    calls = stage("encode", function="dry_run", result=6)
    assert end("encode", "--data", "pics", "--dry-run", "--no-probe", "--json") == 6
    [(_, options)] = calls
    assert (options["probe"], options["as_json"], options["data"]) == (False, True, "pics")


def test_the_other_stages_get_their_options(stage: Callable[..., Calls]) -> None:
    bucket, train, export, sample, demo = (stage(n) for n in ("bucket", "train", "export", "sample", "demo"))
    assert end("bucket", "--name", "mine", "--config", "sana_600m_512") == 0
    assert bucket[0][0][0].data.resolution == 512
    assert bucket[0][1] == {"name": "mine", "dry_run": False, "as_json": False, "move": False}
    assert end("bucket", "--dry-run", "--json", "--set", "bucket.caches=[c]") == 0
    assert bucket[1][0][0].bucket.caches == ["c"]
    assert bucket[1][1] == {"name": None, "dry_run": True, "as_json": True, "move": False}
    assert end("train", "--snapshot", "s", "--resume", "auto") == 0
    assert train[0][1] == {"snapshot": "s", "resume": "auto", "quarantine": None, "origin": None}
    assert end("train", "--quarantine", "q") == 0
    assert train[1][1] == {"snapshot": None, "resume": None, "quarantine": "q", "origin": None}
    assert end("export", "--checkpoint", "c", "--out", "o") == 0
    assert export[0][0][1:] == ("c", Path("o"))
    assert end("sample", "--snapshot", "s", "--count", "2", "--out", "o") == 0
    assert sample[0][0][1:] == ("auto", "s", Path("o"), 2)
    assert end("demo", "--out", "o", "--quick") == 0
    assert demo == [((Path("o"),), {"quick": True})]


def test_bucket_packs_what_it_made_or_what_is_named(stage: Callable[..., Calls]) -> None:
    bucket, pack = stage("bucket", result="made"), stage("pack")
    checked: list[str | None] = []
    vars(sys.modules["sana_pipe.stages.pack"])["check_name"] = checked.append
    assert end("bucket", "--pack", "--name", "n") == 0
    assert len(bucket) == 1 and pack[0][1] == {
        "snapshot": "made",
        "name": "n",
        "as_json": False,
        "move": False,
        "latest": False,
    }
    assert bucket[0][1] == {}, "the name is the packed snapshot's"
    assert end("bucket", "--pack", "--snapshot", "s", "--json", "--latest", "--move") == 0
    assert len(bucket) == 1 and pack[1][1] == {
        "snapshot": "s",
        "name": None,
        "as_json": True,
        "move": True,
        "latest": True,
    }
    filtered = ["--pack", "--snapshot", "s", "--filter", "width > 1"]  # of a snapshot that is there
    repeated = ["--pack", "--snapshot", "s", "--like", "r"]
    shown = ["--pack", "--snapshot", "s", "--show-duplicates", "f"]
    alone = (["--snapshot", "s"], ["--latest"], ["--pack", "--dry-run"], ["--pack", "--json"])
    for wrong in (*alone, filtered, repeated, shown):
        assert end("bucket", *wrong) == 2
    assert len(bucket) == 1 and len(pack) == 2 and checked == ["n", None]
    assert end("bucket", "--pack", "--like", "r", "--set", "bucket.batch=2") == 0
    assert bucket[1][1] == {"like": "r", "chosen": ["bucket.batch"]}


def test_decode_is_the_sampling_stages_other_half(stage: Callable[..., Calls]) -> None:
    calls = stage("sample", function="decode")
    assert end("decode", "--latents", "l", "--out", "o") == 0
    assert calls[0][0][1:] == (Path("l"), Path("o"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("encode",),
        ("encode", "--data", "d", "--task-index", "-1", "--task-count", "2"),
        ("sample", "--count", "0"),
        ("train", "--resum", "auto"),
        ("trian",),
        ("bucket", "extra"),
        ("bucket", "--move"),
        ("verify", "--data", "photos=/elsewhere"),
        (),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert end(*arguments) == 2
    printed = capsys.readouterr()
    assert "Usage: sana-pipe" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    "share", [["--task-index", "1"], ["--task-count", "2"], ["--task-index", "2", "--task-count", "2"]]
)
def test_a_share_that_cannot_be_ends_with_2(share: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert end("encode", "--config", "tiny", "--data", "d", *share) == 2
    assert "--task-index" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("encode", "--data", ""),
        ("encode", "--data", ".", "--source-name", ""),
        ("encode", "--prompts", ""),
        ("train", "--snapshot", ""),
        ("train", "--from="),
        ("report", "--out", ""),
        ("config", ""),
        ("snapshots", "name", "latest", ""),
    ],
)
def test_an_empty_value_is_never_taken_for_the_default(
    stage: Callable[..., Calls], arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [stage(name) for name in ("encode", "train", "bucket", "report", "config")]
    assert end(*arguments) == 2 and calls == [[], [], [], [], []]
    assert "is empty" in capsys.readouterr().err


def test_the_empty_prompt_is_drawn(stage: Callable[..., Calls]) -> None:
    calls = stage("sample", function="run_prompts")
    assert end("sample", "--prompt", "") == 0 and calls[0][0][2] == ("",)


def test_a_stages_exit_code_is_passed_on(stage: Callable[..., Calls]) -> None:
    stage("bucket", result=7)
    assert end("bucket") == 7
    stage("bucket", result=None)
    assert end("bucket") == 0
    stage("bucket", result={"a": "result object"})
    assert end("bucket") == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("wrong", expected=1, found=2, fix="repair it"), 2),
        (CacheError("no cache"), 3),
        (IntegrityError("damaged"), 4),
    ],
)
def test_a_users_mistake_has_a_message_and_its_own_code(
    stage: Callable[..., Calls], capsys: pytest.CaptureFixture[str], error: UserError, code: int
) -> None:
    stage("bucket", result=error)
    assert end("bucket", "--config", "sana_600m_512") == code
    printed = capsys.readouterr()
    assert printed.err == f"sana-pipe: {error}\n"
    assert printed.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--set", "train.output=s3://key:secret@bucket/run"),
        ("status", "--set", "mirror.path=s3://key:secret@bucket/mirror"),
        ("export", "--out", "s3://key:secret@bucket/out"),
        ("report", "--out", "https://key:secret@host/r.html"),
        ("inspect", "--run", "s3://key:secret@bucket/run"),
        ("sample", "--watch", "s3://key:secret@bucket/run"),
        ("demo", "--out", "s3://key:secret@bucket/demo"),
    ],
)
def test_a_url_is_no_folder_of_this_machine(
    stage: Callable[..., Calls], capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    calls = stage(arguments[0], function="watch" if "--watch" in arguments else "run")
    assert end(*arguments) == 2 and not calls
    said = capsys.readouterr().err
    assert "URL" in said and "secret" not in said
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_the_configuration(stage: Callable[..., Calls], capsys: pytest.CaptureFixture[str]) -> None:
    calls = stage("train")
    assert end("train", "--set", "train.stepps=3") == 2
    assert "did you mean 'train.steps'?" in capsys.readouterr().err
    assert calls == []


def test_a_defect_keeps_its_traceback(stage: Callable[..., Calls]) -> None:
    stage("bucket", result=ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["bucket"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("encode", "--data", "LONG"),
        ("encode", "--data", "LONG/x-{0..1}.tar"),
        ("encode", "--data", "LONG/x.jsonl"),
        ("bucket", "--config", "LONG"),
        ("status", "--set", "cache=LONG"),
        ("export", "--checkpoint", "LONG"),
        ("sample", "--checkpoint", "LONG"),
        ("demo", "--out", "LONG"),
        ("encode", "--data", ".", "--set", "vae.id=LONG"),
    ],
)
def test_an_unusable_path_is_no_defect(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(b"x")
    assert end(*(argument.replace("LONG", "n" * 300) for argument in arguments)) in (2, 3)
    assert "too long" in capsys.readouterr().err


def test_a_forbidden_folder_is_the_users_error_and_other_system_errors_are_defects(
    stage: Callable[..., Calls], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage("bucket", result=PermissionError(errno.EACCES, "Permission denied", "/shut/cache"))
    assert end("bucket") == 2
    assert "/shut/cache: Permission denied" in capsys.readouterr().err
    for number in (errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
        stage("bucket", result=OSError(number, "refused", f"/shut/{number}"))
        assert end("bucket") == 2
        assert f"/shut/{number}: refused" in capsys.readouterr().err
    for defect in (FileNotFoundError(errno.ENOENT, "No such file", "/x"), PermissionError(errno.EACCES, "no name")):
        stage("bucket", result=defect)
        with pytest.raises(OSError):
            main(["bucket"])
    stat = os.stat

    def shut(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if "shut" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", shut)
    for arguments in (("encode", "--data", "shut"), ("status", "--set", "cache=shut"), ("status", "--config", "shut")):
        assert end(*arguments) in (2, 3)
        assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(("stopped_by", "code"), [("SIGINT", 130), ("SIGTERM", 0), (None, 0)])
def test_an_interrupted_training_is_no_success(stage: Callable[..., Calls], stopped_by: str | None, code: int) -> None:
    """It saved, but `train && export` must not continue. A scheduler's signal is expected and ends with 0."""
    stage("train", result=types.SimpleNamespace(stopped_by=stopped_by))
    assert end("train") == code


@pytest.mark.parametrize(
    ("rank", "everywhere", "printed"),
    [
        (0, True, "sana-pipe: lost\n"),
        (0, False, "sana-pipe: lost\n"),
        (1, True, ""),
        (1, False, "sana-pipe: process 1: lost\n"),
    ],
)
def test_a_launch_prints_an_error_once(
    stage: Callable[..., Calls],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    everywhere: bool,
    printed: str,
) -> None:
    """Rank 0 prints an error of all processes; another rank prints an error of its own."""
    from sana_pipe import cli

    waits: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_ADDR", "x"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    error = CacheError("lost")
    error.everywhere = everywhere
    stage("bucket", result=error)
    assert end("bucket", "--config", "sana_600m_512") == 3
    assert capsys.readouterr().err == printed
    assert waits == ([cli.OTHER_RANK_DELAY_S] if rank and not everywhere else []), (
        "the launcher may end it before it speaks"
    )


def test_every_error_has_a_code_of_its_kind_in_the_table() -> None:
    kinds_by_code = kinds()
    for code, of_code in kinds_by_code.items():
        roots = [kind for kind in of_code if not any(base in of_code for base in kind.__mro__[1:])]
        assert len(roots) == 1, f"exit code {code} means several things: {roots}"
    assert set(kinds_by_code) | {0, 1, processes.OUTPUT_LOST, INTERRUPTED} == set(EXIT_CODES)
    known = {command.name for command in (*cli.commands.values(), *cli.commands["snapshots"].commands.values())}
    assert {name for _, names in EXIT_CODES.values() for name in names} <= known


def kinds() -> dict[int, set[type[UserError]]]:
    """Exit code -> the errors of the product that end with it."""
    import importlib
    import pkgutil

    import sana_pipe.stages

    for package in (sana_pipe, sana_pipe.stages):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name != "sana_pipe.data.work.ray_engine":  # ray need not be installed
                importlib.import_module(module.name)
    kinds_by_code: dict[int, set[type[UserError]]] = {}
    todo: list[type[UserError]] = [UserError]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__module__.startswith("sana_pipe."):
            kinds_by_code.setdefault(kind.exit_code, set()).add(kind)
    return kinds_by_code


def test_the_page_has_every_exit_code_and_every_reason() -> None:
    """One table for programs; its texts are those of `help exit-codes`."""
    page = (Path(__file__).parents[1] / "docs/metrics.md").read_text().partition("## Exit codes and reasons")[2]
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|$", page.partition("\n## ")[0], re.MULTILINE)
    reasons = {code: sorted(f"`{kind.code()}`" for kind in of_code) for code, of_code in kinds().items()}
    wanted = [(str(code), ", ".join(reasons.get(code, [])), EXIT_CODES[code][0]) for code in EXIT_CODES]
    assert rows == wanted, "\n".join(f"| {' | '.join(row)} |" for row in wanted)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (UserError("wrong", expected=1, found="x", fix="repair it"), 2, "user"),
        (NoSpaceError("full", fix="free space"), 6, "no-space"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 6, "no-space"),
        (ZeroDivisionError("ours"), None, "defect"),
    ],
)
def test_an_error_is_an_object_too_where_one_is_asked_for(
    stage: Callable[..., Calls],
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int | None,
    reason: str,
) -> None:
    stage("status", result=error)
    if code is None:
        with pytest.raises(type(error)):
            main(["status", "--json"])
    else:
        assert end("status", "--json") == code
    printed = capsys.readouterr()
    [said] = json.loads(printed.out).values()
    assert said["code"] == reason and set(said) == {"code", "what", "expected", "found", "fix"}
    if isinstance(error, UserError):
        assert said["what"] == error.what and said["fix"] == error.fix and printed.err


@pytest.mark.parametrize("words", [("gc", "--olderr", "3"), ("status", "--set", "train.stepps=3"), ("bucket", "--nam")])
def test_a_wrong_command_line_is_an_object_too(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert end(*words, "--json") == 2
    said = json.loads(capsys.readouterr().out)["error"]
    assert said["code"] == ("config" if "--set" in words else "usage") and words[1].strip("-")[:4] in said["what"]


@pytest.mark.parametrize(("restarts", "asked"), [("100", True), ("0", False)])
def test_torchrun_is_asked_to_end_for_a_wrong_option_alone(
    stage: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch, restarts: str, asked: bool
) -> None:
    """Not for an error that a restart may help with, and not by each process of a node."""
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: ended.append(process))
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in {**launched, "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_MAX_RESTARTS": restarts}.items():
        monkeypatch.setenv(name, value)
    for words in (("train", "--set", "train.stepps=3"), ("train", "--no-such-option")):
        assert end(*words) == 2 and ended == [os.getppid()] * asked
        ended.clear()
    stage("train", result=CacheError("not there"))
    assert end("train") == 3 and not ended
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert end("train", "--set", "train.stepps=3") == 2 and not ended


STAGES = {"bucket": ("bucket", "pack"), "diff": ("snapshots",)}


def test_the_table_names_the_codes_that_a_command_can_give() -> None:
    """Of the rarer ones: those whose errors are raised in what the stage imports."""
    root = Path(sana_pipe.__file__).parent.parent
    modules = {module_name(path, root): path for path in [*root.glob("pipeline/**/*.py"), *root.glob("stages/*.py")]}
    targets = {module: [target for _, target in imports(path, root)] for module, path in modules.items()}
    nodes.cache_clear()
    raisers = {
        5: ("sana_pipe.data.encoding.rejects", "RejectRateError"),
        7: ("sana_pipe.train.training.metadata_reader", "CheckpointError"),
        8: ("sana_pipe.tools.reporting.encoder_process", "DecodeError"),
        9: ("sana_pipe.train.training.step", "NonFiniteError"),
        10: ("sana_pipe.train.training.lock", "RunTaken"),
    }
    # export and sample read checkpoints with the module that also writes them, under the run's lock; inspect and report
    # print what is wrong with one, and forget lists them
    apart = {(10, "export"), (10, "sample")} | {
        (code, name) for code in (7, 10) for name in ("inspect", "report", "forget")
    }
    for name in (
        "encode",
        "bucket",
        "snapshots",
        "diff",
        "train",
        "export",
        "sample",
        "status",
        "verify",
        "gc",
        "inspect",
        "report",
        "view",
        "forget",
        "push",
        "pull",
        "check",
    ):
        reached, todo = set[str](), [f"sana_pipe.stages.{stage}" for stage in STAGES.get(name, (name,))]
        while todo:
            module = todo.pop()
            if module in modules and module not in reached:
                reached.add(module)
                for target in targets[module]:
                    todo += [target, target.rpartition(".")[0]]
        able = {
            code
            for code, (module, kind) in raisers.items()
            if module in reached and f"raise {kind}(" in modules[module].read_text() and (code, name) not in apart
        }
        if "sana_pipe.train.training.feeding" in reached:  # raises a RejectRateError after the run has saved
            able |= {5}
        assert {code for code in raisers if name in EXIT_CODES[code][1]} == able, name


def test_help_prints_the_exit_codes_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert end("help", "exit-codes") == 0
    printed = capsys.readouterr().out
    shown = {int(line.split()[0]) for line in printed.splitlines() if line[:3].strip()[:1].isdigit()}
    assert shown == set(EXIT_CODES)
    assert "[train, export, sample]" in printed
    for words in ([], *([name] for name in cli.commands)):
        assert end(*words, "--help") == 0
        assert "Exit codes:" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["train"], ["snapshots", "diff"]])
def test_help_prints_that_of_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert end(*words, "--help") == 0
    help = capsys.readouterr().out
    assert end("help", *words) == 0
    assert capsys.readouterr().out == help
    assert end("help", *words, "no-such") == 2


def test_an_interrupt_ends_with_130(stage: Callable[..., Calls], capsys: pytest.CaptureFixture[str]) -> None:
    stage("bucket", result=KeyboardInterrupt())
    assert end("bucket") == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_real_process_reports_a_mistake_without_a_traceback(tmp_path: Path) -> None:
    """From another directory, as the sampling stage starts its decoder."""
    command = processes.command("bucket", "--config", "absent.yaml")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "there is no configuration file 'absent.yaml'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_real_process_ends_with_130_on_ctrl_c(tmp_path: Path) -> None:
    """SIGINT while a command works: here the configuration is a pipe without a writer."""
    os.mkfifo(tmp_path / "never.yaml")
    writers: list[int] = []

    def reads() -> bool:
        """Whether the command has opened the pipe; it then waits for bytes as long as it has a writer."""
        with suppress(OSError):
            writers.append(os.open(tmp_path / "never.yaml", os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    code = (
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from sana_pipe import cli, config; "
        "cli.main(['bucket', '--config', 'never.yaml'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        until(reads)
        # A signal right before a read that blocks would not end it.
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
        for writer in writers:
            os.close(writer)
    assert process.returncode == 130
    assert "Traceback" not in printed


def test_a_command_may_open_as_many_files_as_the_system_allows() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
        with pytest.raises(SystemExit):
            main(["--version"])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _paths(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Parameter]]:
    """The options of all commands that name files or folders, by their help."""
    for parameter in command.params:
        if parameter.metavar and set(re.split(r"[|=]", parameter.metavar)) & {"DIR", "FILE", "PATH", "RUN"}:
            yield words, parameter
    for name, below in getattr(command, "commands", {}).items():
        yield from _paths(below, (*words, name))


PATHS = list(_paths(cli))


@pytest.mark.parametrize(("words", "parameter"), PATHS, ids=[f"{' '.join(w)} {p.name}" for w, p in PATHS])
def test_no_path_of_the_command_line_has_a_variable_that_is_not_set(
    words: tuple[str, ...], parameter: click.Parameter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--out='$SCRATCH/x'` made a folder of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    command: click.Command = cli
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    before, behind = list[str](), list[str]()  # of an argument, what stands before it
    for other in (each for each in command.params if each.required and each is not parameter):
        is_option = not isinstance(other, click.Argument)
        first = is_option or command.params.index(other) < command.params.index(parameter)
        (before if first else behind).extend([*([other.opts[0]] if is_option else []), "x"])
    option = "" if isinstance(parameter, click.Argument) else f"{parameter.opts[0]}="
    prefix = "photos=" if parameter.metavar == "NAME=DIR" else ""

    def value(text: str) -> Any:
        context = command.make_context(words[-1], [*before, f"{option}{prefix}{text}", *behind])
        return context.params[str(parameter.name)]

    with pytest.raises(UserError, match=naming("SCRATCH")):
        value("$SCRATCH/x")
    monkeypatch.setenv("SCRATCH", "/scratch")
    assert value("$SCRATCH/x") in (f"{prefix}/scratch/x", (f"{prefix}/scratch/x",))
    if not prefix:
        assert value("~/x") in (f"{tmp_path}/home/x", (f"{tmp_path}/home/x",))
