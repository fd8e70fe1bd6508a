"""The kit for a machine with a GPU, on the CPU; and training Sana 1.6B on a GPU, against smaller cards and compiled."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu import rows as kit
from benchmarks.gpu import steps
from benchmarks.gpu.__main__ import headline, measured
from benchmarks.gpu.rows import Row
from benchmarks.gpu.sizes import Sizes
from sana_pipe.base.launch import Launch
from sana_pipe.train.parallel import mesh
from sana_pipe.train.parallel.parallelize import parallelize
from tests.support.workers import tiny_run
from tests.support.workers.memory_modes import whole

ROOT = Path(__file__).resolve().parents[2]
NULL = {"mfu", "online_mfu", *kit.PREDICTED}
"""Null on the CPU, whose peak is unknown, and where `plan` refuses."""


def run_kit(*arguments: str, module: str = "benchmarks.gpu") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_yields_its_figures_with_the_carried_wheels_alone(tmp_path: Path) -> None:
    """In an environment that lacks whatever a machine with a GPU lacks."""
    out, rows = tmp_path / "kit.jsonl", kit.chosen(None)
    done = run_kit("--dry", "--out", str(out), module="tests.support.only_wheels")
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [r for r in results if not r["ok"]] == []
    assert done.returncode == 0, done.stderr
    assert [r["row"] for r in results] == [row.name for row in rows]
    for row, result in zip(rows, results, strict=True):
        figures = result["figures"]
        assert {name for name in row.yields if figures[name] is None} <= NULL, row.name
        assert "predicted_gib" not in figures or (figures["predicted_gib"] is None) == ("not_predicted" in figures)
        assert row.given.get("train", {}).get("compile") == "block" or "not_predicted" not in figures
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["rows"], last["failed"], last["left_out"]) == (len(rows), 0, 0)
    assert {name for name, value in last.items() if value is None} == {"mfu"}


def test_what_a_row_gives_fits_its_function() -> None:
    sizes = Sizes.of(dry=True)
    for row in kit.ROWS:
        module, _, name = row.call.partition(":")
        inspect.signature(getattr(importlib.import_module(module), name)).bind(sizes, **row.given)
        if "train" in row.given:
            steps.settings(replace(sizes, dry=False), row.given.get("microbatch", 1), row.given["train"])


COMPILED = {json.dumps(row.given["train"]): row for row in kit.ROWS if row.given.get("train", {}).get("compile")}
"""One row for each configuration that compiles."""


@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILED.values(), ids=lambda row: row.name)
def test_rows_that_compile_trace_their_graphs(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the dry run leaves out, since each takes seconds."""
    monkeypatch.setattr("sana_pipe.train.parallel.parallelize.COMPILE_BACKEND", "eager")
    assert row.given["train"]["compile"] == "block"
    torch._dynamo.utils.counters.clear()
    _, _, name = row.call.partition(":")
    figures = getattr(steps, name)(replace(Sizes.of(dry=True), graphs=True), **row.given)
    assert set(row.yields) <= figures.keys() and figures["images_per_s"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_after_a_row_that_fails_the_next_is_run(tmp_path: Path) -> None:
    pid, own = tmp_path / "pid", "tests.support.kit_rows:"
    rows = [
        Row("breaks", own + "breaks", 60, ()),
        Row("hangs", own + "hangs", 15, (), {"pid": str(pid)}),
        Row("lacks", own + "yields", 60, ("a", "b"), {"a": 1}),
        Row("bad", own + "yields", 60, ("ok",), {"ok": False}),
        Row("chats", own + "chats", 60, ("a",)),
        Row("good", own + "yields", 60, ("a",), {"a": 2.5}),
    ]
    results = {r["row"]: r for r in kit.run(rows, 10, dry=True)}
    assert [results[row.name]["ok"] for row in rows] == [False, False, False, False, True, True]
    assert "this row is broken" in results["breaks"]["error"]
    assert "15 s" in results["hangs"]["error"]
    assert "lacks does not yield b" in results["lacks"]["error"]
    assert results["good"]["figures"] == {"a": 2.5} and results["chats"]["figures"] == {"a": 1}
    if pid.exists():  # else it was ended while it imported
        for _ in range(50):
            state = Path(f"/proc/{pid.read_text()}/stat")
            if not state.exists() or state.read_text().split()[2] == "Z":
                break
            time.sleep(0.1)
        else:
            raise AssertionError("a row's child outlived it")


def test_a_plan_that_breaks_fails_the_row_which_keeps_its_measured_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("no plan")

    monkeypatch.setattr(steps, "_prediction", broken)
    [row] = kit.chosen(["step/default"])
    result = kit.here(row, dry=True, seconds=60)
    assert not result["ok"] and result["figures"]["images_per_s"] > 0
    assert "no plan" in result["figures"]["not_predicted"]


def test_rows_without_time_are_listed_and_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, clock = list[float](), [100.0]
    monkeypatch.setattr(kit, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def late(row: Row, dry: bool, seconds: float) -> dict[str, Any]:
        calls.append(seconds)
        clock[0] += 0.2
        return {"ok": False, "error": "ended", "late": True}

    rows = [Row("a", "m:f", 60, ()), Row("b", "m:f", 60, ())]
    results = list(kit.run(rows, 0.1 / 60, dry=True, call=late))
    assert [r["ok"] for r in results] == [None, None]
    assert calls == pytest.approx([0.1])
    results = list(kit.run(rows[:1], 5, dry=True, call=late))
    assert [r["ok"] for r in results] == [False], "its limit, not the end of the session"


def test_the_exit_code_says_whether_a_row_failed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from benchmarks.gpu import __main__ as program

    for ok, code in ((True, 0), (False, 1)):
        rows = (Row("only", "tests.support.kit_rows:yields", 60, ("ok",), {"ok": ok}),)
        monkeypatch.setattr(kit, "ROWS", rows)
        monkeypatch.setattr(sys, "argv", ["kit", "--dry", "--rows", "only"])
        assert program.main() == code
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == code
    monkeypatch.setattr(sys, "argv", ["kit", "--rows", "other"])
    assert program.main() == 2
    assert "no such row: other" in capsys.readouterr().err


def test_without_a_gpu_the_kit_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    from benchmarks.gpu import __main__ as program

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["kit"])
    assert program.main() == program.NO_GPU
    assert "no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no wheels"):
        program.install(tmp_path)


FIRST = [
    *("versions", "compiler", "tests/kernels", "encode/gemma", "encode/vae", "trainer", "step/fast"),
    *("tests/rest", "profile/fast", "24gb/came-8", "24gb/came-16", "24gb/adamw8bit-8", "24gb/adamw8bit-16"),
    "buckets/fast",
]
"""What a card is asked first: whether the rest can be measured, what stops users, what decides speed and memory."""


def test_the_first_minutes_of_a_card_decide_the_most(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import __main__ as program

    assert [row.name for row in kit.chosen(None)][: len(FIRST)] == FIRST
    monkeypatch.setattr(sys, "argv", ["kit", "--list"])
    assert program.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][: len(FIRST)] == FIRST


def test_rows_are_chosen_in_the_order_that_is_given(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*names: str) -> list[str]:
        return [row.name for row in kit.chosen(names)]

    assert chosen("step/fast", "device", "step", "encode") == [
        *("step/fast", "device", "step/default", "step/full-32", "encode/gemma", "encode/vae")
    ]
    assert chosen("buckets", "buckets/default") == ["buckets/fast", "buckets/default"]
    from benchmarks.gpu import __main__ as program

    monkeypatch.setattr(sys, "argv", ["kit", "--dry", "--rows", "device", "compiler", "versions"])
    assert program.main() == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"row"')]
    assert [(result["row"], result["ok"]) for result in results] == [
        *(("device", True), ("compiler", True), ("versions", True))
    ]


def test_rows_have_names_of_their_own_and_the_headline_finds_them() -> None:
    names = [row.name for row in kit.ROWS]
    assert len(set(names)) == len(names)
    assert headline({"step/full-32": {"images_per_s": 30.0}, "diffusers/full-32": {"images_per_s": 20.0}})[
        "vs_diffusers"
    ] == pytest.approx(1.5)
    cards = {"24gb/came-8": {"fits": True}, "24gb/came-16": {"fits": False}, "48gb/came-48": {"fits": False}}
    assert (headline(cards)["batch_24gb"], headline(cards)["batch_48gb"]) == (8, 0)
    assert headline({"24gb/came-8": {}})["batch_24gb"] is None, "it did not run"


def test_rows_of_an_earlier_call_are_not_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "new" / "kit.jsonl"
    assert measured(out) == {}
    lines = [
        {"row": "a", "ok": True, "figures": {"x": 1}},
        {"row": "b", "ok": False, "error": "e"},
        {"row": "c", "ok": None},
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured(out) == {"a": {"x": 1}}
    out.write_text("no json")
    with pytest.raises(SystemExit, match="cannot be used"):
        measured(out)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_query_backward", "linear attention"),
        ("_gate_forward", "gated convolution"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "softmax attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "softmax attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "matrix product"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix product"),
        ("triton_poi_fused_add_mul_native_layer_norm_3", "compiled"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>", "norm"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp>", "reduction"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "elementwise"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_classed_by_name(name: str, kind: str) -> None:
    assert steps.kernel_class(name) == kind


def test_the_kernels_in_the_classes_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pipeline/train/kernels").glob("*_triton.py"))
    named = re.findall(r"\^(_\w+)\$", " ".join(pattern for _, pattern in steps.CLASSES[:2]))
    launched = set(re.findall(r"(_\w+)\[(?:grid|whole|_grid\([^\]]*\))\]", text))
    assert set(named) == launched


def test_a_profile_counts_states_of_generators_that_are_read() -> None:
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    for preserved, count in ((True, 1), (False, 0)):
        with steps.generator_reads() as reads:
            checkpoint(layer, x, use_reentrant=False, preserve_rng_state=preserved)
        assert len(reads) == count


def test_operations_on_padding_count_only_where_padding_is_computed() -> None:
    sizes = Sizes.of(dry=True)
    mask = steps.batch_of(sizes, 4, packed=True).mask
    assert int(mask.sum()) < mask.numel() == 4 * sizes.rows
    for packed, rows in ((False, mask.numel()), (True, int(mask.sum()))):
        assert steps.step_flops(sizes, 4, packed) == sizes.config.training_flops(4, sizes.side**2, rows)


def test_the_page_names_rows_that_exist_for_every_path() -> None:
    text = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    text = text.partition("\n## On a GPU\n")[2].partition("\n## ")[0]
    known = {row.name for row in kit.ROWS} | {row.name.partition("/")[0] for row in kit.ROWS}
    named = set(re.findall(r"`kit: ([^`]+)`", text))
    assert named <= known, named - known
    assert {name.partition("/")[0] for name in named} == {row.name.partition("/")[0] for row in kit.ROWS}
    paths = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| path", "| step"))]
    assert len(paths) > 20
    assert [line for line in paths if "`kit: " not in line and "| nothing" not in line] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["24gb/came-8", "48gb/came-32"])
def test_full_fine_tuning_fits_a_smaller_card(name: str) -> None:
    [row] = kit.chosen([name])
    figures = kit.in_a_process(row, dry=False, seconds=row.seconds)["figures"]
    assert figures["fits"]
    assert figures["reserved_gib"] <= row.given["cap_gib"]


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_on_a_gpu(recompute: str) -> None:
    """In bf16 both round, at different places; compiled blocks must not be further from fp32 than plain ones."""

    def gradients(compiled: str, precision: str) -> dict[str, torch.Tensor]:
        settings = tiny_run.config(
            compile=compiled, precision=precision, activation_checkpointing=recompute, device="cuda"
        )
        with mesh.open_mesh(Launch(), settings.train.parallel, torch.device("cuda", 0)) as devices:
            parallel_model = parallelize(tiny_run.model(settings), devices, settings.train)
            batch = tiny_run.global_batch(0)
            latents, captions = (x.float() if precision == "fp32" else x for x in (batch.latents, batch.captions))
            inputs = (latents, captions, batch.mask, batch.logit.abs() * 500)
            out = parallel_model.module(*(x.cuda() for x in inputs))
            out.float().square().mean().backward()
            return {name: whole(p.grad).cpu() for name, p in parallel_model.module.named_parameters()}  # type: ignore[arg-type]

    exact, plain, compiled = gradients("none", "fp32"), gradients("none", "bf16"), gradients("block", "bf16")
    limit = 1.25 * tiny_run.distance(plain, exact)
    assert tiny_run.distance(compiled, exact) <= limit <= 0.1


@pytest.mark.slow
def test_the_state_of_8_bits_is_counted_in_its_bytes() -> None:
    """Not in those of the numbers that it stands for."""
    sizes = Sizes.of(dry=True)
    plain, small = (steps.optimizer(sizes, train=train)["state_gib"] for train in ({}, kit.EIGHT_BIT))
    assert small < 0.5 * plain
