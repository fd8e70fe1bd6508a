"""The seams: a part of a model that is trained, a second loss, another architecture, each without a line elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.launch import Launch
from sana_pipe.train.models import adapters
from sana_pipe.train.models.adapters.lora import DoRA, LoRA
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.parallel.mesh import open_mesh
from sana_pipe.train.training import build, checkpoint, metrics
from sana_pipe.train.training.assemble import Trainable, assemble
from sana_pipe.train.training.base_weights import whole_weights
from sana_pipe.train.training.metadata_reader import CheckpointError, read_metadata
from tests.support.checkpoints import load_model_state
from tests.support.launched import run_worker
from tests.support.low_rank import LAYER, Aligned, LowRank
from tests.support.workers import seams, tiny_run
from tests.support.workers.drawings import distance, drawn

CPU = torch.device("cpu")
LAST = "checkpoints/step-00000004"
TRAINED = {f"{LAYER}.lora_A", f"{LAYER}.lora_B"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process: uninterrupted, and stopped after two steps and resumed."""
    path = tmp_path_factory.mktemp("seams")
    for kind in seams.KINDS:
        seams.run(kind, seams.settings(path, f"{kind}, one"))
        seams.run(kind, seams.settings(path, f"{kind}, stopped", steps=2))
        seams.run(kind, seams.settings(path, f"{kind}, stopped"), resume="auto")
    return path


def names(folder: Path) -> dict[str, set[str]]:
    """Of the tensors of a checkpoint, by section."""
    found: dict[str, set[str]] = {}
    for name in read_metadata(folder / ".metadata").state_dict_metadata:
        section, _, rest = name.partition(".")
        found.setdefault(section, set()).add(rest)
    return found


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics.read(folder / "metrics.jsonl")]


def errors(folder: Path) -> list[float]:
    """Of the chosen and the rejected pictures of each step, and the reference's."""
    names = "chosen", "rejected", "chosen_reference", "rejected_reference"
    return [row["parts"][name] for row in metrics.read(folder / "metrics.jsonl") for name in names]


@pytest.mark.slow
def test_a_part_that_is_trained_is_all_that_is_updated_averaged_and_saved(folder: Path) -> None:
    held = names(folder / "low rank, one" / LAST)
    assert held["model"] == held["ema"] == TRAINED
    assert {name.removeprefix("state.").rpartition(".")[0] for name in held["optim"]} == TRAINED
    document = checkpoint.read_document(folder / "low rank, one" / LAST)
    assert document.adapter == {"kind": "low rank", "rank": 2} and document.base is not None
    weights, average = (load_model_state(folder / "low rank, one" / LAST, ema=ema)[1] for ema in (False, True))
    assert all(weights[name].abs().max() > 0 for name in TRAINED), "lora_B starts at zero"
    assert not torch.equal(average[f"{LAYER}.lora_B"], weights[f"{LAYER}.lora_B"])


def assembled(trainable: Trainable, settings: Any, mesh: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    module = trainable.module(settings.train)
    values = trainable.values(trainable.spec.initial(0), module, 0)

    def placed(model: Any) -> None:
        build.load_sharded(model.module, values)

    names = "model", "optimizer", "ema", "step"
    parts = assemble(trainable, module, mesh, settings.train, CPU, placed=placed)
    made = SimpleNamespace(**dict(zip(names, parts, strict=True)))
    return made, {name: p.detach().clone() for name, p in made.model.module.named_parameters()}


@pytest.mark.parametrize("adapter", [LowRank(), LoRA(2, 3.0, [LAYER]), DoRA(2, 3.0, [LAYER])], ids=str)
def test_the_frozen_part_stays_bit_for_bit_and_the_first_step_is_the_bases(adapter: adapters.Adapter) -> None:
    settings = tiny_run.config(optim={"lr": 1e-2})
    spec, objective = tiny_run.model(settings).config, build.objective_of(settings.train)
    first = []
    for part in (None, adapter):
        with open_mesh(Launch(), settings.train.parallel, CPU) as mesh:
            made, before = assembled(Trainable(spec, objective, part), settings, mesh)
            outcomes = [made.step([tiny_run.global_batch(n)], n + 1) for n in range(2)]
            first.append(float(outcomes[0].loss))
    after = dict(made.model.module.named_parameters())
    added = TRAINED | ({f"{LAYER}.lora_magnitude"} if isinstance(adapter, DoRA) else set())
    assert {name for name in after if not torch.equal(before[name], after[name])} == added
    assert sum(len(group["params"]) for group in made.optimizer.param_groups) == len(added)
    assert first[1] == pytest.approx(first[0], rel=1e-6 if isinstance(adapter, DoRA) else 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", seams.KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, kind: str) -> None:
    assert losses(folder / f"{kind}, one") == losses(folder / f"{kind}, stopped")
    one, other = (checkpoint.read_document(folder / f"{kind}, {name}" / LAST).files for name in ("one", "stopped"))
    one.pop(".metadata"), other.pop(".metadata")
    assert one == other


@pytest.mark.slow
def test_a_resumed_controlnet_draws_what_the_uninterrupted_one_drew(folder: Path) -> None:
    one, other = (
        {path.name: path.read_bytes() for path in (folder / f"controlnet, {name}/pictures").iterdir()}
        for name in ("one", "stopped")
    )
    assert sorted(one) == [f"step-{step:08d}.safetensors" for step in (0, 2, 4)] and one == other


@pytest.mark.slow
def test_another_base_and_another_part_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = seams.settings(folder, "low rank, stopped", steps=5)
    whole = tiny_run.task(given)
    with pytest.raises(CheckpointError, match="adapter"):
        seams.fit(given.train, whole, Launch(), resume="auto", log=lambda line: None)
    monkeypatch.setattr(build, "start_values", lambda weights, seed, spec: spec.initial(7))
    with pytest.raises(CheckpointError, match="another base"):
        seams.run("low rank", given, resume="auto")


@pytest.mark.parametrize("parallel", [{"tp_size": 2}, {"pp_size": 2}])
@pytest.mark.parametrize("part", ["adapter", "objective"])
def test_strategies_that_divide_matrices_and_blocks_are_refused_by_name(parallel: dict[str, int], part: str) -> None:
    settings = tiny_run.config(parallel=parallel)
    spec, objective = tiny_run.model(settings).config, build.objective_of(settings.train)
    trainable = Trainable(spec, objective, LowRank()) if part == "adapter" else Trainable(spec, Aligned(FlowConfig()))
    with pytest.raises(ConfigError, match=next(iter(parallel))):
        trainable.module(settings.train)


@pytest.mark.slow
def test_an_adapter_is_exported_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sana_pipe.stages.export

    given = seams.settings(folder, "low rank, one")
    with pytest.raises(UserError, match="unknown kind"):
        sana_pipe.stages.export.run(given, "auto", tmp_path / "out")
    monkeypatch.setitem(adapters.KINDS, "low rank", "tests.support.low_rank:LowRank")
    sana_pipe.stages.export.run(given, "auto", tmp_path / "out")
    weights = load_model_state(folder / "low rank, one" / LAST)[1]
    stored = load_file(tmp_path / "out/low_rank.safetensors")
    assert stored.keys() == weights.keys() and all(torch.equal(stored[name], weights[name]) for name in stored)


# ----------------------------------------------------------------------------------------------------- a second loss


@pytest.mark.slow
def test_both_parts_are_trained_logged_and_validated(folder: Path) -> None:
    run = folder / "aligned, one"
    rows = metrics.read(run / "metrics.jsonl")
    for row in rows:
        assert row["loss"] == pytest.approx(row["parts"]["flow"] + 0.5 * row["parts"]["aligned"], rel=1e-6)
    assert len({row["parts"]["aligned"] for row in rows}) == len(rows) == 4
    for row in metrics.read_events(run / "metrics.jsonl")["validation"]:
        for weights in ("", "ema_"):
            parts = row[f"{weights}parts"]
            assert row[f"{weights}loss"] == pytest.approx(parts["flow"] + 0.5 * parts["aligned"], rel=1e-6)
    other = metrics.read_events(folder / "low rank, one/metrics.jsonl")
    assert not any("parts" in row for row in (*other[None], *other["validation"])), "one part is the loss"


@pytest.mark.slow
def test_the_objectives_own_modules_are_saved_and_not_exported(folder: Path) -> None:
    held = names(folder / "aligned, one" / LAST)
    own = {"objective.head.weight", "objective.head.bias"}
    assert own <= held["model"] and own <= held["ema"]
    place, key = folder / "aligned, one" / LAST, "model.objective.head.weight"
    stored = torch.empty(read_metadata(place / ".metadata").state_dict_metadata[key].size)
    dcp.load({key: stored}, checkpoint_id=place, no_dist=True)
    drawn = Aligned(FlowConfig()).initial("objective.head.weight", tuple(stored.shape), 0)
    assert 1e-3 < (stored - drawn).abs().max() < 0.1, "trained for four steps"
    spec, weights = load_model_state(folder / "aligned, one" / LAST)
    assert weights.keys() == spec.shapes().keys()


def test_a_tapped_block_has_gradients_of_both_losses() -> None:
    """Without a flow loss the blocks above the tap have none."""
    settings = tiny_run.config()
    objective = Aligned(settings.train.flow)
    objective.parts = {"flow": 0.0, "aligned": 1.0}
    with open_mesh(Launch(), settings.train.parallel, CPU) as mesh:
        made, _ = assembled(Trainable(tiny_run.model(settings).config, objective), settings, mesh)
        made.model.forward_backward([made.step.prepare(tiny_run.global_batch(0))], made.step.loss, 8)
        norms = {name: float(p.grad.norm()) for name, p in made.model.module.named_parameters() if p.grad is not None}
    assert norms["transformer_blocks.1.ff.conv_point.weight"] > 0 and norms["objective.head.weight"] > 0
    assert norms["transformer_blocks.2.ff.conv_point.weight"] == 0


# ------------------------------------------------------------------------------------------------------ two processes


@pytest.fixture(scope="module")
def launched(folder: Path) -> Path:
    run_worker("seams", folder, processes=2, timeout_s=500)
    return folder


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", seams.KINDS)
@pytest.mark.parametrize("name", ["FSDP2", "DDP", "resumed"])
def test_two_processes_are_one(launched: Path, kind: str, name: str) -> None:
    one, two = losses(launched / f"{kind}, one"), losses(launched / f"{kind}, {name}")
    assert two == pytest.approx(one[-len(two) :], abs=1e-5)
    places = [launched / f"{kind}, {run}" / LAST for run in ("one", name)]
    assert names(places[0]) == names(places[1])
    for ema in (False, True):
        expected, actual = (load_model_state(place, ema=ema)[1] for place in places)
        assert tiny_run.distance(actual, expected) <= (1e-5 if kind == "prefer" else 1e-4)


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_pairs_under_hsdp_are_one_process(folder: Path) -> None:
    run_worker("seams", folder, processes=4, timeout_s=500)
    for kind in seams.PAIRS:
        assert losses(folder / f"{kind}, HSDP") == pytest.approx(losses(folder / f"{kind}, one")[:2], abs=1e-5)


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["FSDP2", "DDP", "resumed"])
def test_two_processes_draw_with_a_controlnet_what_one_draws(launched: Path, name: str) -> None:
    for step in (2, 4):
        one, two = (drawn(launched / f"controlnet, {run}", step)[0] for run in ("one", name))
        assert len(one) == 2 * len(tiny_run.TEXTS) and distance(two, one) <= 1e-5
    assert distance(one, drawn(launched / "controlnet, one", 2)[0]) > 1e-4, "the comparison sees two steps"


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", seams.KINDS)
def test_in_bf16_they_train_alike(launched: Path, kind: str) -> None:
    one, bf16 = losses(launched / f"{kind}, one"), losses(launched / f"{kind}, bf16")
    if kind == "prefer, whole":  # beta multiplies a difference of four errors: they train alike
        one, bf16 = (errors(launched / f"{kind}, {name}") for name in ("one", "bf16"))
        assert bf16[:4] == [bf16[0], bf16[1], bf16[0], bf16[1]], "at first the model is the reference, in bf16, too"
    assert bf16 == pytest.approx(one, rel=2e-2)


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_readers_draw_what_another_number_of_processes_has_resumed(launched: Path, tmp_path: Path) -> None:
    """One process began it, two went on: diffusers, ComfyUI's rule and merged weights give one output."""
    from diffusers import SanaPipeline, SanaTransformer2DModel

    import sana_pipe.stages.export
    from benchmarks.adapters import patched

    pytest.importorskip("peft")
    given, spec = seams.settings(launched, "dora, resumed"), tiny_run.model(seams.settings(launched, "dora")).config
    for form in ("diffusers", "comfyui"):
        sana_pipe.stages.export.run(given, "auto", tmp_path / form, form=form)
    stored = checkpoint.ModelTensors(launched / "dora, resumed" / LAST)
    for name, strength in (("base", 0.0), ("merged", 1.0)):
        spec.save(
            whole_weights(given.model.weights, given.train.seed, stored, strength), tmp_path / name, torch.float32
        )
    base, merged, comfyui, loaded = (
        SanaTransformer2DModel.from_pretrained(tmp_path / name).eval() for name in ("base", "merged", "base", "base")
    )
    comfyui.load_state_dict(patched(spec, comfyui.state_dict(), next((tmp_path / "comfyui").glob("*.safetensors"))))
    pipe = SanaPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=loaded, scheduler=None)
    pipe.load_lora_weights(tmp_path / "diffusers")
    batch = tiny_run.global_batch(0)

    @torch.no_grad()
    def output(model: Any) -> torch.Tensor:
        inputs = (batch.latents.float(), batch.captions.float(), batch.logit.abs() * 500)
        return model(*inputs, encoder_attention_mask=batch.mask.long(), return_dict=False)[0]

    expected = output(merged)
    assert (output(base) - expected).abs().max() > 1e-3
    for model in (loaded, comfyui):
        assert (output(model) - expected).abs().max() <= 1e-5


# ------------------------------------------------------------------------------------------------ another architecture


def test_another_architecture_goes_from_the_cache_to_an_export(
    small_cache_copy: Path, make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PixArt of diffusers: checked, planned, trained, resumed, drawn and exported; only `tests/support` names it."""
    import sana_pipe.stages.export
    import sana_pipe.stages.train
    from sana_pipe.base import gpus
    from sana_pipe.data.cache.cache import Cache
    from sana_pipe.tools.planning import predict
    from sana_pipe.tools.reporting.draw_latents import SnapshotTensors
    from sana_pipe.train.models import spec
    from sana_pipe.train.models.sampler import noise_of, pad_rows
    from tests.support import pixart
    from tests.support.drawings import draw_for

    monkeypatch.setitem(spec.KINDS, pixart.CLASS, "tests.support.pixart:PixArt")
    torch.manual_seed(0)
    start = pixart.PixArtTransformer2DModel(**pixart.asdict(pixart.PixArt()))
    start.save_pretrained(tmp_path / "start")
    options = ["train.device=cpu", "train.precision=fp32", "train.steps=2", "train.log_every=1", "train.ema={}"]
    options += [f"model.weights={{id: {tmp_path / 'start'}}}", "model.arch=null"]
    options += ["train.optim.warmup_steps=0", "train.activation_checkpointing=full", "train.compile=none"]
    config = make_config(tmp_path, f"cache={small_cache_copy}", *options)
    snapshot = Cache(small_cache_copy).open_snapshot()

    given = build.architecture_of(config.model, 8)
    assert isinstance(given, pixart.PixArt)
    data, machine = predict.Data.of(snapshot), predict.Machine(gpus.card("h100"), 80 << 30, 1)
    assert predict.predict(config.train, given, data, machine).fits
    with pytest.raises(ConfigError, match=f"{pixart.CLASS} .*tp_size"):
        given.check_parallel(2, 1)
    with pytest.raises(ConfigError, match="in_channels is 16"):
        given.check_widths("these latents", "another model", channels=4)

    sana_pipe.stages.train.run(config, log=lambda line: None)
    more = make_config(tmp_path, f"cache={small_cache_copy}", *options, "train.steps=3")
    sana_pipe.stages.train.run(more, resume="auto", log=lambda line: None)
    rows = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["model_tflops"] > 0 for row in rows)
    place = tmp_path / "run/checkpoints/step-00000003"
    architecture, weights = load_model_state(place)
    assert architecture == given
    moved = {name for name, p in start.named_parameters() if not torch.equal(p, weights[name])}
    assert len(moved) > 0.9 * len(weights)

    sana_pipe.stages.export.run(more, "auto", tmp_path / "out")
    exported = pixart.PixArtTransformer2DModel.from_pretrained(tmp_path / "out/transformer")
    assert all(torch.equal(p, weights[name]) for name, p in exported.named_parameters())
    own = architecture.loaded(weights)
    latents, rows_of = torch.randn(2, 16, 8, 4), torch.randn(2, 5, 128)
    inputs = latents, rows_of, torch.ones(2, 5, dtype=torch.bool), torch.tensor([10.0, 900.0])
    keys = "encoder_hidden_states", "encoder_attention_mask", "timestep"
    expected = exported(latents, **dict(zip(keys, inputs[1:], strict=True))).sample
    torch.testing.assert_close(own(*inputs), expected)
    (drawn,) = draw_for(more, architecture, dict(weights), snapshot, [0])
    sigmas = architecture.scheduler(config.train.flow.shift)
    sigmas.set_timesteps(config.sample.steps)
    latent = noise_of(drawn.sample_id, tuple(drawn.cached.shape), config.sample.seed)
    records = SnapshotTensors(snapshot)
    entry = snapshot.sample(0)
    at = max(range(len(entry.captions)), key=lambda i: entry.captions[i].weight)
    text, mask = pad_rows([records.null(), records.text(entry, at)])
    for now, later in zip(sigmas.sigmas[:-1], sigmas.sigmas[1:], strict=True):
        with torch.no_grad():
            none, some = own(latent.expand(2, -1, -1, -1), text, mask, (now * 1000).expand(2)).chunk(2)
        latent = latent + (later - now) * (none + config.sample.guidance * (some - none))
    torch.testing.assert_close(drawn.latent, latent[0], atol=1e-4, rtol=1e-4)

    index = json.loads((tmp_path / "out/model_index.json").read_text())
    assert index == {
        "_class_name": "PixArtAlphaPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Gemma2Model"],
        "tokenizer": ["transformers", "GemmaTokenizerFast"],
        "transformer": ["diffusers", pixart.CLASS],
        "vae": ["diffusers", "AutoencoderDC"],
    }
    solver = json.loads((tmp_path / "out/scheduler/scheduler_config.json").read_text())
    assert solver["_class_name"] == "FlowMatchEulerDiscreteScheduler" and solver["shift"] == config.train.flow.shift
    text = (tmp_path / "out/README.md").read_text()
    assert "from diffusers import PixArtAlphaPipeline" in text and "sana" not in text.split("\n---\n")[0]


def test_the_class_of_a_part_is_that_of_its_pipeline_or_of_its_configuration(tmp_path: Path) -> None:
    from sana_pipe.tools.reporting.export_folder import class_of

    def named(**values: Any) -> list[str]:
        (tmp_path / "vae").mkdir(exist_ok=True)
        (tmp_path / "vae/config.json").write_text(json.dumps(values))
        return class_of(tmp_path / "vae", "vae")

    assert named(_class_name="AutoencoderKL") == ["diffusers", "AutoencoderKL"]
    assert named(architectures=["Qwen3ForCausalLM"]) == ["transformers", "Qwen3Model"]
    with pytest.raises(ConfigError, match="names no class"):
        named(architectures=None)
    (tmp_path / "model_index.json").write_text(json.dumps({"vae": ["diffusers", "AutoencoderOther"]}))
    assert named(_class_name="AutoencoderKL") == ["diffusers", "AutoencoderOther"]
    (tmp_path / "model_index.json").write_text(json.dumps({"vae": ["foreign_code", "AutoencoderOther"]}))
    assert named(_class_name="AutoencoderKL") == ["diffusers", "AutoencoderKL"]


def test_a_plan_of_a_model_whose_shapes_depend_on_data_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from sana_pipe.base import gpus
    from sana_pipe.tools.planning import predict
    from sana_pipe.train.models.sana import SanaTransformer

    forward = SanaTransformer.forward

    def cut(self: Any, latents: Any, captions: Any, mask: Any, timesteps: Any) -> Any:
        captions[mask]
        return forward(self, latents, captions, mask, timesteps)

    monkeypatch.setattr(SanaTransformer, "forward", cut)
    settings = tiny_run.config()
    spec = tiny_run.model(settings).config
    data = predict.Data({(64, 64): 2}, None, 4, 8, spec.in_channels, spec.caption_channels)
    machine = predict.Machine(gpus.card("h100"), 80 << 30, 1)
    with pytest.raises(ConfigError, match=spec.class_name):
        predict.predict(settings.train, spec, data, machine)
