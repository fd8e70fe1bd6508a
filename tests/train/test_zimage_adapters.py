"""Files of LoRA and DoRA of Z-Image: diffusers' pipeline, ComfyUI by its own names, and merged weights draw one flow.

`transformer.MODULE.lora_A.weight` is a name that ComfyUI knows for Z-Image, with query, key and value apart (`Lumina2`
in its `model_lora_keys_unet`), so that diffusers' file of a LoRA serves both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.adapters import patched
from sana_pipe.base.errors import ConfigError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Merged, adapter_of, files
from tests.support.tiny_zimage import TINY, inputs, predicted, reference, save

BATCH = inputs(8, 12, (5, 33), 40)


def flow(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return predicted(model, [BATCH])[0]


def trained(kind: str, targets: Any, folder: Path) -> Merged:
    """An adapter with drawn values on a base in a folder."""
    save(folder)
    given = {"kind": kind, "rank": 3, "alpha": 5.0, "targets": targets}
    adapter = adapter_of(TrainConfig.model_validate({"adapter": given}), TINY)
    assert adapter is not None
    module = TINY.module()
    adapter.apply(module)
    base = TINY.stored(folder / "transformer")
    generator, values = torch.Generator().manual_seed(7), {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        drawn = torch.randn(parameter.shape, generator=generator)
        start = adapter.initial(name, tuple(parameter.shape), 0, base)
        values[name] = start * (1 + 0.1 * drawn) if "magnitude" in name else 0.1 * drawn
    return Merged(TINY, adapter, base, values)


def adapted(weights: Merged) -> nn.Module:
    """Our module with the adapter next to the base."""
    module = TINY.module()
    weights.adapter.apply(module)
    module.load_state_dict({**weights.at(0), **weights.trained}, assign=True)
    return module.eval()


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_diffusers_draws_what_was_trained(kind: str, targets: str, tmp_path: Path) -> None:
    from diffusers import ZImagePipeline

    weights = trained(kind, targets, tmp_path)
    weights.adapter.save("diffusers", weights, tmp_path, torch.float32)
    loaded, merged = reference(), reference()
    pipe = ZImagePipeline(tokenizer=None, text_encoder=None, vae=None, transformer=loaded, scheduler=None)
    pipe.load_lora_weights(tmp_path)
    merged.load_state_dict(dict(weights))
    expected, count = flow(merged), len(TINY.module().blocks) * (4 if targets == "attention" else 7)  # type: ignore[arg-type]
    assert len(weights.adapter.targets) == count  # type: ignore[attr-defined]
    assert (flow(reference()) - expected).abs().max() > 0.01, "the adapter changes nothing"
    assert (flow(loaded) - expected).abs().max() <= 1e-5
    with torch.no_grad():
        assert (adapted(weights)(**BATCH) - expected).abs().max() <= 1e-5


def comfyui(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base with a file of a LoRA, by ComfyUI's rule for Z-Image: `transformer.NAME` is the tensor of that name, or
    a third of the rows of `qkv`; W + alpha / rank * B A, where alpha is the rank if the file names none."""
    model = {theirs: torch.cat([reference_values()[name] for name in names]) for theirs, names in PARTS.items()}
    known = {f"transformer.{name.removesuffix('.weight')}": name for names in PARTS.values() for name in names}
    places = {name: (theirs, number) for theirs, names in PARTS.items() for number, name in enumerate(names)}
    used = set()
    for key, name in known.items():
        if f"{key}.lora_A.weight" not in stored:
            continue
        used |= {f"{key}.lora_A.weight", f"{key}.lora_B.weight"}
        b, a = stored[f"{key}.lora_B.weight"], stored[f"{key}.lora_A.weight"]
        theirs, number = places[name]
        model[theirs][number * len(b) : (number + 1) * len(b)] += b @ a
    assert used == stored.keys(), "a name that ComfyUI does not know"
    return {name: rows for theirs, names in PARTS.items() for name, rows in split(model[theirs], names).items()}


def split(whole: Tensor, names: list[str]) -> dict[str, Tensor]:
    return dict(zip(names, whole.chunk(len(names)), strict=True))


def reference_values() -> dict[str, Tensor]:
    from tests.support.tiny_zimage import weights

    return weights()


PARTS = TINY.joined_parts()


def test_one_file_serves_comfyui_too(tmp_path: Path) -> None:
    weights = trained("lora", "all", tmp_path)
    weights.adapter.save("diffusers", weights, tmp_path, torch.float32)
    found = comfyui(load_file(tmp_path / files.DIFFUSERS_FILE))
    assert all(torch.allclose(found[name], weights[name], atol=1e-6) for name in weights)
    assert any(not torch.equal(found[name], weights.at(0)[name]) for name in weights)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_file_for_comfyui_has_its_joined_names(kind: str, tmp_path: Path) -> None:
    """For DoRA, whose lengths of rows ComfyUI reads by no name of diffusers, it has whole differences."""
    weights = trained(kind, "all", tmp_path)
    weights.adapter.save("comfyui", weights, tmp_path, torch.float32, stem="file")
    stored = load_file(tmp_path / "file.safetensors")
    assert any(key.startswith("diffusion_model.layers.0.attention.qkv.") for key in stored)
    found = patched(TINY, dict(weights.at(0)), tmp_path / "file.safetensors")  # type: ignore[arg-type]
    assert all(torch.allclose(found[name], weights[name], atol=1e-6) for name in weights)


def test_a_run_goes_on_from_the_file(tmp_path: Path) -> None:
    weights = trained("lora", "attention", tmp_path)
    weights.adapter.save("diffusers", weights, tmp_path, torch.float32)
    given = {"kind": "lora", "rank": 3, "targets": "attention", "start": str(tmp_path / files.DIFFUSERS_FILE)}
    adapter = adapter_of(TrainConfig.model_validate({"adapter": given}), TINY)
    assert adapter is not None
    name = "noise_refiner.1.attention.to_out.0.lora_B"
    start = adapter.initial(name, tuple(weights.trained[name].shape), 0, weights.base)
    assert torch.allclose(start, weights.trained[name] * 5 / 3)


def test_the_header_names_the_model() -> None:
    header = files.header("title", "base", "", 1024, 3, 16, TINY.family)
    assert header["ss_base_model_version"] == "zimage" and header["modelspec.architecture"] == "zimage/lora"
    assert not any("sana" in value for value in header.values())


def test_a_pattern_without_a_fit_is_refused() -> None:
    given = {"adapter": {"targets": ["attn1.to_q"]}}
    with pytest.raises(ConfigError, match=r"attn1\.to_q"):
        adapter_of(TrainConfig.model_validate(given), TINY)
