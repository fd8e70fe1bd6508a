"""ControlNet: diffusers is the judge of outputs, gradients and exports; NVlabs' rule is another function."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.train
from sana_pipe.base.errors import ConfigError
from sana_pipe.base.launch import Launch
from sana_pipe.config import Config
from sana_pipe.data.loader.loader import Batch
from sana_pipe.stages import export
from sana_pipe.tools.demo import small_models
from sana_pipe.tools.planning import predict
from sana_pipe.tools.planning.trace import Shape, Traced
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models import sampler
from sana_pipe.train.models.adapters import Merged, adapter_of
from sana_pipe.train.models.adapters.controlnet import PREFIX, ControlNet
from sana_pipe.train.models.sampler import Sampling, pad_rows
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_shape import deinterleave
from sana_pipe.train.models.spec import spec_of
from sana_pipe.train.parallel.compile import compile_conditions
from sana_pipe.train.parallel.mesh import Layout
from sana_pipe.train.training import checkpoint, metrics
from sana_pipe.train.training.assemble import Trainable, objective_of
from sana_pipe.train.training.trainer import fit
from tests.support.controlnets import BASE, saved, settings, start, trained, weights_of
from tests.support.launched import results_by_case
from tests.support.tiny_sana import TINY, inputs, make
from tests.support.workers import controlnets, tiny_run

# With other draws a query meets hardly any key, divides by almost nothing and makes rounding errors of 1e-5.
CONTROL = torch.randn(3, 4, 6, 12, generator=torch.Generator().manual_seed(2))
GIVEN = inputs((6, 12))


def predicted(base: Any, control: Any, scale: float = 1.0) -> Tensor:
    """By diffusers, as its pipeline calls it."""
    latents, captions, mask, timesteps = GIVEN
    given = {"encoder_hidden_states": captions, "encoder_attention_mask": mask.long(), "timestep": timesteps}
    (added,) = control(latents, controlnet_cond=CONTROL, conditioning_scale=scale, return_dict=False, **given)
    return base(latents, controlnet_block_samples=tuple(added), return_dict=False, **given)[0]


def distance(found: Tensor, expected: Tensor) -> float:
    return tiny_run.distance({"": found.detach()}, {"": expected.detach()})


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("scale", [None, 1.5])
def test_the_first_step_is_the_bases_bit_for_bit(scale: float | None) -> None:
    config = replace(BASE, interpolation_scale=scale)
    model = start(config, layers=3)
    with torch.no_grad():
        assert torch.equal(model(*GIVEN, CONTROL), make(config)(*GIVEN))
        assert torch.equal(trained(config, layers=3)(*GIVEN), make(config)(*GIVEN)), "without a control it is the base"


@pytest.mark.parametrize(("layers", "scale"), [(3, None), (1, None), (2, 1.5)])
def test_outputs_and_gradients_equal_diffusers(layers: int, scale: float | None, tmp_path: Path) -> None:
    ours = trained(replace(BASE, interpolation_scale=scale), layers=layers)
    base, control = saved(ours, tmp_path)
    output, expected = ours(*GIVEN, CONTROL), predicted(base, control)
    assert distance(output, expected) <= 1e-6 < 0.05 < distance(output, ours(*GIVEN))
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    for result in (output, expected):
        (result * weight).sum().backward()
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    theirs = dict(control.named_parameters())
    assert gradients.keys() == {f"{PREFIX}{name}" for name in theirs}, "the base has none"
    found = {name: deinterleave(name, value) for name, value in gradients.items()}
    assert tiny_run.distance(found, {f"{PREFIX}{name}": p.grad for name, p in theirs.items()}) <= 1e-6


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_so_do_gradients_of_two_processes(tmp_path: Path) -> None:
    for name, row in results_by_case(controlnets, tmp_path).items():
        assert row["loss"] <= 1e-6 and row["gradient"] <= 1e-6, name


def test_nvlabs_rule_is_another_function_of_equal_weights() -> None:
    """NVlabs' module (diffusion/model/nets/sana_multi_scale_controlnet.py) runs the base's block 0 first, feeds the
    copy with its output, and adds before a block."""

    def by_nvlabs(model: SanaTransformer) -> Tensor:
        latents, captions, mask, timesteps = GIVEN
        height, width = model.grid(latents, mask)
        net = model.controlnet
        assert net is not None
        hidden, context, bias, modulation, embedded = model.embed(latents, captions, mask, timesteps)
        shared = context, bias, modulation, height, width
        hidden = model.transformer_blocks[0](hidden, *shared)
        copy = hidden + net.input_block(model.patch_embed(CONTROL))
        for number, block in enumerate(model.transformer_blocks[1:]):
            if number < len(net.transformer_blocks):
                copy = net.transformer_blocks[number](copy, *shared)
                hidden = hidden + net.controlnet_blocks[number](copy)
            hidden = block(hidden, *shared)
        return model.head(hidden, embedded, height, width)

    with torch.no_grad():
        first, later = start(layers=3), trained(layers=3)
        assert distance(by_nvlabs(first), first(*GIVEN)) <= 1e-6
        base, ours = later(*GIVEN), later(*GIVEN, CONTROL)
        assert distance(by_nvlabs(later) - base, ours - base) > 0.1


def test_a_strength_is_the_scale_of_diffusers_pipeline(tmp_path: Path) -> None:
    ours = trained(layers=2)
    base, control = saved(ours, tmp_path)
    values = {f"{PREFIX}{name}": value for name, value in weights_of(ours, True).items()}
    stored = BASE.stored(tmp_path / "transformer")
    adapter = ControlNet(2)
    for strength in (1.0, 0.3):
        weights = Merged(BASE, adapter, stored, values, strength)
        model = BASE.loaded(dict(weights), prepare=adapter.apply)
        with torch.no_grad():
            assert distance(model(*GIVEN, CONTROL), predicted(base, control, strength)) <= 1e-6
    assert Merged(BASE, adapter, stored, values, 0.0).keys() == stored.shapes.keys()


def test_the_pipeline_of_diffusers_draws_the_same(tmp_path: Path) -> None:
    from diffusers import AutoencoderDC, SanaControlNetPipeline

    small_models.make_vae(tmp_path / "vae", [], steps=0)
    vae = AutoencoderDC.from_pretrained(tmp_path / "vae")
    channels = vae.config.latent_channels
    ours = trained(replace(BASE, in_channels=channels, out_channels=channels), layers=2).eval()
    base, control = saved(ours, tmp_path)
    pipe = SanaControlNetPipeline(None, None, vae, base, control, sampler.scheduler(3.0))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(6)
    *rows, null = (torch.randn(count, 24, generator=generator) for count in (10, 4, 1))
    noise = torch.randn(2, channels, 8, 12, generator=generator)
    image = torch.rand(2, 3, 64, 96, generator=generator) * 2 - 1
    padded, mask = pad_rows([*rows, null])
    theirs = pipe(
        control_image=image,
        prompt_embeds=padded[:2],
        prompt_attention_mask=mask[:2].long(),
        negative_prompt=None,
        negative_prompt_embeds=padded[2:].expand(2, -1, -1),
        negative_prompt_attention_mask=mask[2:].long().expand(2, -1),
        num_inference_steps=4,
        height=64,
        width=96,
        latents=noise.clone(),
        use_resolution_binning=False,
        output_type="latent",
    ).images
    with torch.no_grad():
        latents = vae.encode(image).latent * vae.config.scaling_factor
    both = torch.cat([latents, latents])
    drawn = sampler.sample(lambda *given: ours(*given, both), rows, null, noise, Sampling(4))
    assert (
        distance(drawn, theirs) <= 1e-4 < 0.01 < distance(sampler.sample(ours, rows, null, noise, Sampling(4)), theirs)
    )


def test_strategies_have_all_blocks_in_the_order_of_the_forward_pass() -> None:
    model, called = start(layers=2), []
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: called.append(number))
    compile_conditions(model, "eager")
    model(*GIVEN, CONTROL)
    assert called == list(range(2 + BASE.num_layers))
    assert all("conditions" in vars(part) for part in (model, model.controlnet)), "both are compiled"


# ------------------------------------------------------------------------------------------------------------ options


def test_the_number_of_blocks_is_diffusers_or_what_the_base_allows() -> None:
    assert replace(TINY, num_layers=20).controlnet().num_layers == 7
    assert TINY.controlnet().num_layers == 2
    with pytest.raises(ConfigError, match="layers=2"):
        adapter_of(settings(layers=3), TINY)
    with pytest.raises(ConfigError, match="qk_norm"):
        adapter_of(settings(), replace(TINY, qk_norm="rms_norm_across_heads"))


def test_a_default_is_diffusers_shape() -> None:
    from diffusers import SanaControlNetModel

    with torch.device("meta"):
        theirs = SanaControlNetModel()

    ours = SanaConfig().controlnet()
    assert ours.shapes() == {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert sum(p.numel() for p in theirs.parameters()) == pytest.approx(632e6, rel=1e-3)
    known = {name: value for name, value in theirs.config.items() if not name.startswith("_")}
    assert {name: value for name, value in ours.to_dict().items() if name in known} == known
    assert ours.to_dict().keys() - known.keys() == {"_class_name"}


def test_what_is_trained_is_said_once() -> None:
    for other in ({"adapter": {}}, {"only": ["attn2"]}):
        with pytest.raises(ValueError, match="not both"):
            TrainConfig.model_validate({"controlnet": {}, **other})
    with pytest.raises(ValueError, match="no control pictures"):
        TrainConfig.model_validate({"controlnet": {}, "pictures": {"prompts": "prompts"}})
    with pytest.raises(ValueError, match=r"a ControlNet leaves its base as it is; set preserve: null"):
        TrainConfig.model_validate({"controlnet": {}, "preserve": {}})


@pytest.mark.parametrize("parallel", [{"tp_size": 2}, {"pp_size": 2}])
def test_strategies_that_divide_matrices_and_blocks_are_refused(parallel: dict[str, int]) -> None:
    train = tiny_run.config(parallel=parallel).train.model_copy(update={"controlnet": settings().controlnet})
    with pytest.raises(ConfigError, match=next(iter(parallel))):
        Trainable(TINY, objective_of(train), adapter_of(train, TINY)).module(train)


def test_a_folder_or_file_of_diffusers_is_continued(tmp_path: Path) -> None:
    ours = trained(layers=2)
    saved(ours, tmp_path)
    places = tmp_path / "controlnet", tmp_path / "controlnet/diffusion_pytorch_model.safetensors", tmp_path
    for place in places:
        again = start(layers=2, start=str(place))
        with torch.no_grad():
            assert torch.equal(again(*GIVEN, CONTROL), ours(*GIVEN, CONTROL))
    wrong = {
        (3, places[0]): "holds 2 blocks, this run 3",
        (3, places[1]): "missing transformer_blocks.2",
        (1, places[1]): "unexpected controlnet_blocks.1.bias",
        (2, tmp_path / "transformer"): "missing .*controlnet_blocks",
        (2, tmp_path / "nothing"): "nothing",
    }
    for (layers, place), message in wrong.items():
        with pytest.raises(ConfigError, match=rf"train\.controlnet\.start: .*{message}"):
            adapter_of(settings(layers=layers, start=str(place)), BASE)
    adapter_of(settings(start="missing"), BASE, start=False)
    with pytest.raises(ConfigError) as error:
        adapter_of(settings(layers=3, start=str(tmp_path)), BASE)
    assert error.value.fix == "--set train.controlnet.layers=2"
    described = tmp_path / "controlnet/config.json"
    described.write_text(json.dumps({"_class_name": "SanaControlNetModel"}))
    with pytest.raises(ConfigError, match=r"missing transformer_blocks\.2"):
        adapter_of(settings(layers=3, start=str(tmp_path)), BASE)


def test_a_controlnet_is_no_base(tmp_path: Path) -> None:
    saved(trained(layers=2), tmp_path)
    values = json.loads((tmp_path / "controlnet/config.json").read_text())
    with pytest.raises(ConfigError, match="describes another model") as error:
        spec_of(values)
    assert "train.controlnet.start" in str(error.value.fix)


def test_a_resume_with_other_blocks_names_the_section(tmp_path: Path) -> None:
    given = run_settings(tmp_path, steps=1)
    fit(given.train, tiny_run.task(given), Launch(), log=lambda line: None)
    other = run_settings(tmp_path, steps=2, controlnet={"layers": 1})
    named = r"train\.controlnet\.layers: the checkpoint has 2, this run 1"
    with pytest.raises(checkpoint.CheckpointError, match=named) as caught:
        fit(other.train, tiny_run.task(other), Launch(), resume="auto", log=lambda line: None)
    assert "--from" not in str(caught.value), "which refuses it, too"


# ------------------------------------------------------------------------------------------------------------ objective


def same(tensor: Tensor) -> Tensor:
    return tensor


def test_dropped_controls_are_zeros_of_drawn_visits() -> None:
    objective = objective_of(settings(control_drop=0.5))
    assert objective.pictures == ("control",)
    batch = tiny_run.global_batch(1)
    whole = objective.prepare(batch, same, torch.float32).inputs["control"]
    dropped = ~whole.flatten(1).any(1)
    assert 0 < dropped.sum() < len(dropped)
    assert torch.equal(whole[~dropped], batch.pictures["control"][~dropped].float())
    parts = [objective.prepare(tiny_run.part(batch, n, n + 1), same, torch.float32).inputs["control"] for n in range(8)]
    assert torch.equal(whole, torch.cat(parts)), "in every topology"
    other = objective.prepare(replace(batch, logit=batch.logit + 0.1), same, torch.float32).inputs["control"]
    assert not torch.equal(dropped, ~other.flatten(1).any(1)), "another visit"
    validated = objective.prepare(batch, same, torch.float32, 0.5).inputs["control"]
    assert validated.flatten(1).any(1).all(), "a validation drops none"
    assert objective_of(settings()).prepare(batch, same, torch.bfloat16).inputs["control"].dtype == torch.bfloat16


def run_settings(folder: Path | str = "unused", **train: Any) -> Config:
    return tiny_run.config(folder, **{"controlnet": {"layers": 2}, "optim": {"lr": 1e-2}, **train})


@pytest.mark.slow
def test_compiled_it_is_the_same_and_needs_few_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sana_pipe.train.parallel.parallelize.COMPILE_BACKEND", "aot_eager")
    losses = []
    for how in ("none", "block"):
        given = run_settings(tmp_path / how, steps=4, compile=how)
        fit(given.train, tiny_run.task(given), Launch(), log=lambda line: None)
        losses.append([row["loss"] for row in metrics.read(tmp_path / how / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_validation_also_has_the_controls_of_other_samples(tmp_path: Path) -> None:
    def validated(name: str, alone: int = 0, **train: Any) -> list[dict[str, Any]]:
        given = run_settings(tmp_path / name, validation={"every": 20}, **train)
        held_out = [(copied(batch), count) for batch, count in tiny_run.held_out(given)]
        held_out += [(copied(held_out[-1][0]), 1)] * alone
        task = tiny_run.task(given, touch=lambda step: copied(tiny_run.global_batch(step)))
        fit(given.train, replace(task, validation=lambda layout: held_out), Launch(), log=lambda line: None)
        return metrics.read_events(tmp_path / name / "metrics.jsonl")["validation"]

    def copied(batch: Batch) -> Batch:
        """The batch with its latents as controls, which tell the noise."""
        return replace(batch, pictures={"control": batch.latents})

    before, after = validated("two", steps=20, microbatch=8)
    assert before["parts"] == {"shuffled_control": pytest.approx(before["loss"])}, "the first step is the base's"
    assert after["parts"]["shuffled_control"] > 1.02 * after["loss"] and after["loss"] < before["loss"]
    assert "parts" not in validated("one", steps=1, microbatch=1)[0], "one sample has no other"
    with_one = validated("alone", alone=3, steps=20, microbatch=8)[1]
    added = with_one["parts"]["shuffled_control"] - with_one["loss"]
    assert with_one["samples"] == after["samples"] + 3
    assert added == pytest.approx(after["parts"]["shuffled_control"] - after["loss"]), "one that is alone has no other"
    batch = tiny_run.global_batch(0)
    other = objective_of(settings()).contrasted(batch).pictures["control"]
    assert torch.equal(other[1:], batch.pictures["control"][:-1]) and torch.equal(
        other[:1], batch.pictures["control"][-1:]
    )


# ------------------------------------------------------------------------------------------------------------- export


def test_an_export_is_the_trained_part_and_says_how_to_load_it(tmp_path: Path) -> None:
    from diffusers import SanaControlNetModel

    given = run_settings(tmp_path / "run", steps=2)
    fit(given.train, tiny_run.task(given), Launch(), log=lambda line: None)
    stored = checkpoint.ModelTensors(tmp_path / "run/checkpoints/step-00000002")
    assert all(name.startswith(PREFIX) for name in stored), "only what is trained is saved"
    export.run(given, "auto", tmp_path / "out")
    theirs = SanaControlNetModel.from_pretrained(tmp_path / "out/controlnet").state_dict()
    assert {f"{PREFIX}{name}" for name in theirs} == set(stored)
    assert all(torch.equal(value, deinterleave(name, stored[f"{PREFIX}{name}"])) for name, value in theirs.items())
    text = (tmp_path / "out/README.md").read_text()
    (call,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "diffusers 0.34 or newer" in text, "0.33 has no SanaControlNetModel"
    assert "SanaControlNetPipeline.from_pretrained(" in call and "load_lora_weights" not in call
    keywords = {word.arg for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call) for word in node.keywords}
    assert {"controlnet", "subfolder", "control_image", "height"} <= keywords
    for form in ("merged", "nvlabs", "comfyui"):
        with pytest.raises(ConfigError, match="a ControlNet of 2 blocks"):
            export.run(given, "auto", tmp_path / form, form=form)


# --------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_counts_base_and_controlnet() -> None:
    train = TrainConfig.model_validate({"controlnet": {"layers": 2}, "compile": "none"})
    train = train.model_copy(update={"microbatch": 2, "activation_checkpointing": "full"})
    count = {name: math.prod(shape) for name, shape in BASE.shapes().items()}
    added = sum(math.prod(shape) for shape in BASE.controlnet(2).shapes().values())
    traced = Traced.of(BASE, train, Layout(1, 1, 1, 1), Shape(8, 8, 10, 2), rank=0, on_gpu=True)
    assert traced.parameters == sum(count.values()) + added
    assert traced.peak["parameters"] == pytest.approx(2 * sum(count.values()) + 4 * added, rel=0.01)
    assert predict.checkpoint_bytes(BASE, train) == 12 * added


# ----------------------------------------------------------------------------------------------------- from the cache


def test_edges_go_from_the_cache_to_an_export(
    small_cache_copy: Path, photos: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    pytest.importorskip("cv2")
    options = ["data.pictures.control.made=canny", "train.controlnet={control_drop: 0.2}", "train.steps=2"]
    options += ["train.device=cpu", "train.precision=fp32", "train.compile=none", "train.ema={}", "train.log_every=1"]
    options += ["bucket.heldout=0.3", "train.validation={}", "train.optim.warmup_steps=0"]
    config = make_config(tmp_path, *options)
    assert sana_pipe.stages.encode.run(config, str(photos))["images"] == 0, "only the controls are made"
    sana_pipe.stages.bucket.run(config)
    sana_pipe.stages.train.run(config, log=lambda line: None)
    more = make_config(tmp_path, *options, "train.steps=3")
    sana_pipe.stages.train.run(more, resume="auto", log=lambda line: None)
    assert [row["step"] for row in metrics.read(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]
    validations = metrics.read_events(tmp_path / "run/metrics.jsonl")["validation"]
    assert all("shuffled_control" in row["parts"] and "shuffled_control" in row["ema_parts"] for row in validations)
    export.run(more, "auto", tmp_path / "out", ema=True)
    assert (tmp_path / "out/controlnet/config.json").is_file()
