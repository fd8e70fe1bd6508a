"""Files of LoRA and DoRA draw what was trained in every reader: diffusers with peft, ComfyUI's rule, merged weights.

The judge is a model of diffusers with layers of peft. Our checkpoints have the same matrices in our channel order.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.adapters import patched
from sana_pipe.base.errors import ConfigError
from sana_pipe.train.models.adapters import Merged, files
from sana_pipe.train.models.adapters.chosen import Chosen
from sana_pipe.train.models.adapters.lora import DoRA, LoRA
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_shape import deinterleave, interleave
from tests.support.messages import naming

ROOT = Path(__file__).resolve().parents[2]

ALL = [f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")]
ALL += ["ff.conv_inverted", "ff.conv_point"]
SHAPE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 12,
    "mlp_ratio": 2.5,
    "sample_size": 4,
    "patch_size": 1,
}


def plain() -> Any:
    from diffusers import SanaTransformer2DModel

    torch.manual_seed(0)
    return SanaTransformer2DModel(**SHAPE, qk_norm="rms_norm_across_heads").eval()


@torch.no_grad()
def flow(model: Any) -> Tensor:
    torch.manual_seed(1)
    inputs = torch.randn(2, 4, 4, 6), torch.randn(2, 5, 12), torch.tensor([3.0, 700.0])
    return model(*inputs, encoder_attention_mask=torch.ones(2, 5), return_dict=False)[0]


class Adapted:
    """A model with trained layers of peft, and its matrices as a checkpoint has them."""

    def __init__(self, targets: list[str], rank: int, alpha: float, dora: bool):
        from peft import LoraConfig

        settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, use_dora=dora)
        self.rank, self.dora = rank, dora
        self.model, self.scaling, self.spec = (
            plain(),
            alpha / rank,
            SanaConfig(**SHAPE, qk_norm="rms_norm_across_heads"),
        )
        self.model.add_adapter(settings)
        self.checkpoint: dict[str, Tensor] = {}
        torch.manual_seed(2)
        for name, parameter in self.model.named_parameters():
            if "lora" not in name:
                continue
            with torch.no_grad():
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter)) if "magnitude" in name else parameter.normal_(
                    0, 0.2
                )
            module, _, kind = name.replace(".default", "").removesuffix(".weight").rpartition(".")
            values = (
                parameter.detach().flatten(1) if parameter.ndim == 4 and "magnitude" not in name else parameter.detach()
            )
            if kind == "lora_magnitude_vector":
                kind, values = "lora_magnitude", values.flatten()
            if kind != "lora_A":
                values = interleave(f"{module}.weight", values)
            self.checkpoint[f"{module}.{kind}"] = values

    def changes(self) -> dict[str, files.Change]:
        return files.changes(self.spec, self.checkpoint, self.scaling)

    def merged(self, folder: Path) -> Merged:
        """The weights with the adapter in them, on a base in `folder`."""
        plain().save_pretrained(folder)
        kind = DoRA if self.dora else LoRA
        adapter = kind(self.rank, self.scaling * self.rank, [*self.changes()])
        return Merged(self.spec, adapter, self.spec.stored(folder), self.checkpoint)


@pytest.fixture(params=["attention", "all"])
def targets(request: pytest.FixtureRequest) -> list[str]:
    return ALL[:8] if request.param == "attention" else ALL


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(("rank", "alpha"), [(4, 4), (3, 8)])
def test_diffusers_draws_what_was_trained(
    targets: list[str], rank: int, alpha: int, dora: bool, tmp_path: Path
) -> None:
    from diffusers import SanaPipeline

    adapted = Adapted(targets, rank, alpha, dora)
    files.save_diffusers(adapted.changes(), tmp_path, torch.float32)
    with safe_open(tmp_path / files.DIFFUSERS_FILE, "pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    assert settings["transformer.rank_pattern"] == {}, "diffusers 0.40 and earlier fail without"
    loaded = plain()
    pipe = SanaPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=loaded, scheduler=None)
    pipe.load_lora_weights(tmp_path)
    expected = flow(adapted.model)
    assert (flow(plain()) - expected).abs().max() > 0.05, "the adapter changes nothing"
    assert (flow(loaded) - expected).abs().max() <= 1e-5


def test_diffusers_draws_without_the_dropout_of_the_training(tmp_path: Path) -> None:
    """It would drop values while it draws, also of a model in `eval`."""
    adapted = Adapted(ALL, 4, 4, dora=False)
    weights = adapted.merged(tmp_path / "base")
    LoRA(4, 4.0, [*adapted.changes()], dropout=0.5).save("diffusers", weights, tmp_path, torch.float32)
    loaded = plain()
    loaded.load_lora_adapter(tmp_path, weight_name=files.DIFFUSERS_FILE, use_safetensors=True)
    assert (flow(loaded) - flow(adapted.model)).abs().max() <= 1e-5


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_reader_without_the_header_draws_it_too(dora: bool, tmp_path: Path) -> None:
    """Such as diffusers before it read settings: alpha is the rank."""
    adapted = Adapted(ALL, 3, 8, dora)
    files.save_diffusers(adapted.changes(), tmp_path, torch.float32)
    loaded = plain()
    loaded.load_lora_adapter(load_file(tmp_path / files.DIFFUSERS_FILE))
    assert (flow(loaded) - flow(adapted.model)).abs().max() <= 1e-5


def comfyui(folder: Path) -> Any:
    """The base with a file of ComfyUI."""
    model = plain()
    spec = SanaConfig(**SHAPE, qk_norm="rms_norm_across_heads")
    model.load_state_dict(patched(spec, model.state_dict(), folder / f"{files.COMFYUI_STEM}.safetensors"))
    return model


@pytest.mark.parametrize("some", [ALL[:8], ALL, ["attn1.to_k", "attn2.to_v", "ff.conv_inverted"]])
@pytest.mark.parametrize(("rank", "alpha"), [(4, 4), (3, 8)])
def test_comfyui_draws_what_was_trained(some: list[str], rank: int, alpha: int, tmp_path: Path) -> None:
    adapted = Adapted(some, rank, alpha, dora=False)
    files.save_comfyui(adapted.spec, adapted.changes(), tmp_path, torch.float32)
    assert (flow(comfyui(tmp_path)) - flow(adapted.model)).abs().max() <= 1e-5


def test_the_alpha_of_a_joined_layer_is_its_rank_in_any_precision(tmp_path: Path) -> None:
    adapted = Adapted(ALL[:8], 87, 87, dora=False)
    files.save_comfyui(adapted.spec, adapted.changes(), tmp_path, torch.bfloat16)
    written = load_file(tmp_path / f"{files.COMFYUI_STEM}.safetensors")
    for name in written:
        if name.endswith(".alpha"):
            down = written[name.removesuffix("alpha") + "lora_A.weight"]
            assert float(written[name]) == len(down) and down.dtype == torch.bfloat16


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    adapted = Adapted(ALL[:2], 3, 3, dora=False)
    said = files.header("dog_step_7", "owner/base", "sks dog", 1024, 7, 3)
    files.save_diffusers(adapted.changes(), tmp_path, torch.float32, said)
    files.save_comfyui(adapted.spec, adapted.changes(), tmp_path, torch.float32, said, "dog_step_7")
    for name in (files.DIFFUSERS_FILE, "dog_step_7.safetensors"):
        with safe_open(tmp_path / name, "pt") as file:
            values = file.metadata()
        assert values["modelspec.trigger_phrase"] == "sks dog" and "sks dog" in values["ss_tag_frequency"]
        assert values["ss_sd_model_name"] == "owner/base" and values["modelspec.resolution"] == "1024x1024"
        assert (values["ss_network_dim"], values["ss_steps"], values["ss_output_name"]) == ("3", "7", "dog_step_7")


@pytest.mark.parametrize(
    ("parameter", "applied"),
    [
        ("transformer_blocks.0.attn1.to_q.weight", True),
        ("transformer_blocks.0.attn1.to_out.0.bias", True),
        ("transformer_blocks.0.attn1.norm_q.weight", True),
        ("caption_norm.weight", True),
        ("transformer_blocks.0.attn2.norm_q.weight", False),
        ("transformer_blocks.1.scale_shift_table", False),
        ("scale_shift_table", False),
    ],
)
def test_what_comfyui_does_not_apply_is_not_written_for_it(parameter: str, applied: bool, tmp_path: Path) -> None:
    spec = SanaConfig(**SHAPE, qk_norm="rms_norm_across_heads")
    plain().save_pretrained(tmp_path / "base")
    base = spec.stored(tmp_path / "base")
    changed = Merged(spec, Chosen([parameter]), base, {parameter: torch.ones(spec.shapes()[parameter])})
    with nullcontext() if applied else pytest.raises(ConfigError, match=naming(parameter, "--format nvlabs")):
        changed.adapter.save("comfyui", changed, tmp_path, torch.float32)
    assert (tmp_path / "comfyui_lora.safetensors").exists() == applied


def test_comfyui_draws_whole_differences(targets: list[str], tmp_path: Path) -> None:
    adapted = Adapted(targets, 3, 8, dora=True)
    names = [f"{module}.weight" for module in adapted.changes()]
    files.save_differences(adapted.merged(tmp_path / "base"), names, tmp_path, torch.float32)
    assert (flow(comfyui(tmp_path)) - flow(adapted.model)).abs().max() <= 1e-5


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_merged_weights_draw_what_was_trained(targets: list[str], dora: bool, tmp_path: Path) -> None:
    from diffusers import SanaTransformer2DModel

    adapted = Adapted(targets, 3, 8, dora)
    weights = adapted.merged(tmp_path / "base")
    adapted.spec.save(weights, tmp_path / "merged", torch.float32)
    assert (flow(SanaTransformer2DModel.from_pretrained(tmp_path / "merged")) - flow(adapted.model)).abs().max() <= 1e-5
    adapted.spec.save(weights.at(0), tmp_path / "without", torch.float32)
    assert torch.equal(flow(SanaTransformer2DModel.from_pretrained(tmp_path / "without")), flow(plain()))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_half_the_strength_is_diffusers_scale(dora: bool, tmp_path: Path) -> None:
    from diffusers import SanaTransformer2DModel

    adapted = Adapted(ALL, 3, 8, dora)
    adapted.spec.save(adapted.merged(tmp_path / "base").at(0.5), tmp_path / "merged", torch.float32)
    adapted.model.set_adapters(["default"], [0.5])
    assert (flow(SanaTransformer2DModel.from_pretrained(tmp_path / "merged")) - flow(adapted.model)).abs().max() <= 1e-5


def test_the_layout_is_tested() -> None:
    """Rows of an adapted convolution would be another model in the other order."""
    adapted = Adapted(ALL, 4, 4, dora=False)
    name = "transformer_blocks.0.ff.conv_inverted"
    ours = adapted.checkpoint[f"{name}.lora_B"]
    assert not torch.equal(ours, deinterleave(f"{name}.weight", ours))


@pytest.mark.slow
def test_the_measurement_keeps_its_limits() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.adapters", "--quick"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert 0 < figures["reader_difference_max"] <= 1e-5
    assert figures["checkpoint_bytes_ratio"] <= 1.1
    assert figures["step_ratio"] <= 0.80
    assert figures["plan_gib_1600m_1024"] <= 10
    assert figures["saved_bytes_ratio"] <= 0.80
