"""LoRA, DoRA and chosen modules: PEFT is the judge of values and gradients; options, start files, frozen bases."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.layer_classes import LayerMixin, add_mixin, without_adapter
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.kernels import joined_linear
from sana_pipe.train.models.adapters import Merged, adapter_of, files, low_rank
from sana_pipe.train.models.adapters.lora import LoRA
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_files import save_weights
from sana_pipe.train.models.sana_shape import deinterleave, interleave
from sana_pipe.train.training.checkpoint import CheckpointError
from tests.support.checkpoints import load_model_state
from tests.support.messages import naming
from tests.support.runs import fit_tiny, same_checkpoints
from tests.support.tiny_sana import TINY, inputs, make
from tests.support.workers import tiny_run

ALL = ["to_q", "to_k", "to_v", "to_out.0", "conv_inverted", "conv_point"]
PARTS = {"lora_A.default.weight": "lora_A", "lora_B.default.weight": "lora_B"}
PARTS |= {"lora_magnitude_vector.default.weight": "lora_magnitude"}


def settings(**adapter: Any) -> TrainConfig:
    return TrainConfig.model_validate({"adapter": adapter})


def adapted(model: SanaTransformer, train: TrainConfig) -> LoRA:
    """Adapt a model in place; the parameters are not initialised."""
    adapter = adapter_of(train, model.config)
    assert isinstance(adapter, LoRA)
    adapter.apply(model)
    return adapter


def theirs_and_ours(folder: Path, kind: str, targets: str) -> tuple[Any, SanaTransformer, LoRA]:
    """Both models with one LoRA of rank 3 and alpha 5 of drawn values."""
    from diffusers import SanaTransformer2DModel
    from peft import LoraConfig

    ours = make(TINY)
    save_weights(ours.state_dict(), TINY, folder, torch.float32)
    theirs = SanaTransformer2DModel.from_pretrained(folder)
    modules = ALL if targets == "all" else ALL[:4]
    theirs.add_adapter(LoraConfig(r=3, lora_alpha=5, target_modules=modules, use_dora=kind == "dora"))
    adapter = adapted(ours, settings(kind=kind, rank=3, alpha=5, targets=targets))
    mine = dict(ours.named_parameters())
    generator = torch.Generator().manual_seed(3)
    for name, parameter in theirs.named_parameters():
        ending = next((each for each in PARTS if name.endswith(each)), None)
        if ending is None:
            continue
        drawn = torch.randn(parameter.shape, generator=generator)
        value = parameter + 0.1 * drawn if "magnitude" in name else 0.1 * drawn
        parameter.data.copy_(value)
        mine[our_name(name)].data.copy_(in_our_layout(name, value))
    return theirs, ours, adapter


def our_name(name: str) -> str:
    ending = next(each for each in PARTS if name.endswith(each))
    return name.removesuffix(ending) + PARTS[ending]


def in_our_layout(name: str, value: Tensor) -> Tensor:
    layer, part = our_name(name).rpartition(".")[::2]
    value = value.detach().reshape(-1) if part == "lora_magnitude" else value.detach().flatten(1)
    return value if part == "lora_A" else interleave(f"{layer}.weight", value)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", ["attention", "all"])
def test_outputs_and_gradients_equal_pefts(kind: str, targets: str, tmp_path: Path) -> None:
    theirs, ours, adapter = theirs_and_ours(tmp_path, kind, targets)
    for model in (theirs, ours):
        model.double()  # PEFT sums norms in another order: 2.4e-5 in the gradients of fp32
    latents, captions, mask, timesteps = inputs((6, 12))
    latents, captions = latents.double(), captions.double()
    output = ours(latents, captions, mask, timesteps)
    expected = theirs(latents, encoder_hidden_states=captions, encoder_attention_mask=mask.long(), timestep=timesteps)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    for result in (output, expected.sample):
        (result * weight).sum().backward()
    assert tiny_run.distance({"x": output.detach()}, {"x": expected.sample.detach()}) <= 1e-5
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    of_peft = {our_name(n): in_our_layout(n, p.grad) for n, p in theirs.named_parameters() if p.grad is not None}
    assert gradients.keys() == of_peft.keys() and len(gradients) == len(adapter.targets) * len(adapter.parts)
    assert tiny_run.distance(gradients, of_peft) <= 1e-5
    with without_adapter(ours), torch.no_grad():
        given = latents, captions, mask, timesteps
        assert torch.equal(ours(*given), make(TINY).double()(*given))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_weights_give_the_adapted_output(kind: str, tmp_path: Path) -> None:
    _, ours, adapter = theirs_and_ours(tmp_path, kind, "all")
    trained = {name: p.detach() for name, p in ours.named_parameters() if p.requires_grad}
    base = make(TINY)
    for name, parameter in base.named_parameters():
        parameter.data = adapter.merged(name, parameter.detach(), trained)
    with torch.no_grad():
        result, expected = base(*inputs((6, 12))), ours(*inputs((6, 12)))
    assert tiny_run.distance({"x": result}, {"x": expected}) <= 1e-5


def test_start_values_are_pefts_distribution_and_the_first_output_is_the_bases() -> None:
    for kind in ("lora", "dora"):
        ours = make(TINY)
        base = TINY.initial(0)
        adapter = adapted(ours, settings(kind=kind, rank=4, targets="all"))
        values = {n: p.detach() for n, p in make(TINY).named_parameters()}

        class Base:
            shapes = base.shapes

            def read(self, name: str, offsets: Any, lengths: Any) -> Tensor:
                return values[name]  # noqa: B023

        for name, p in ours.named_parameters():
            if p.requires_grad:
                p.data.copy_(adapter.initial(name, tuple(p.shape), 0, Base()))  # type: ignore[arg-type]
                if name.endswith("lora_A"):
                    bound = p.shape[1] ** -0.5
                    assert 0.9 * bound < p.abs().max() <= bound and abs(float(p.detach().mean())) < 0.2 * bound
        drawn = dict(ours.named_parameters())
        first, second = (drawn[f"transformer_blocks.{n}.attn1.to_q.lora_A"] for n in (0, 1))
        assert not torch.equal(first, second)
        with torch.no_grad():
            assert tiny_run.distance({"x": ours(*inputs((8, 8)))}, {"x": make(TINY)(*inputs((8, 8)))}) <= 1e-6


# ------------------------------------------------------------------------------------------------- the joined product


@pytest.mark.parametrize("chosen", [["attn1.to_q"], ["attn1.to_v", "attn1.to_q"], ["attn1"], ["attn2"]])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_query_key_and_value_are_one_product(chosen: list[str], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [name if name.count(".") else f"{name}.to_*" for name in chosen]
    ours = make(TINY)
    adapted(ours, settings(kind=kind, rank=2, targets=targets))
    for parameter in ours.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    calls = []
    real = joined_linear.joined_linear
    monkeypatch.setattr(low_rank, "joined_linear", lambda *args: calls.append(1) or real(*args))
    with torch.no_grad():
        joined = ours(*inputs((8, 8)))
        assert len(calls) == TINY.num_layers
        monkeypatch.setattr("sana_pipe.train.models.sana_layers.joined_products", lambda x, layers: None)
        apart = ours(*inputs((8, 8)))
    assert tiny_run.distance({"x": joined}, {"x": apart}) <= 1e-6


def test_a_class_that_computes_the_layer_itself_cannot_bypass_the_adapter() -> None:
    class Replacing(LayerMixin):
        place = "sharding"
        replaces = True

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Transparent(LayerMixin):
        place = "compression"

    model = make(TINY)
    adapted(model, settings(rank=2))
    layer: Any = model.transformer_blocks[0].attn1.to_q  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="bypass"):
        add_mixin(layer, Replacing)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        before = model(*inputs((8, 8)))
        add_mixin(layer, Transparent)  # the joined product falls back to three, adapted alike
        assert tiny_run.distance({"x": model(*inputs((8, 8)))}, {"x": before}) <= 1e-6


# ------------------------------------------------------------------------------------------------------------ options


def test_sets_and_patterns_choose_modules() -> None:
    def targets(chosen: Any) -> list[str]:
        adapter = adapter_of(settings(targets=chosen), TINY)
        assert isinstance(adapter, LoRA)
        return adapter.targets

    assert len(targets("attention")) == 8 * TINY.num_layers and len(targets("all")) == 10 * TINY.num_layers
    assert targets(["transformer_blocks.1.attn2.to_?"]) == [f"transformer_blocks.1.attn2.to_{n}" for n in "qkv"]
    assert targets(["proj_out", "time_embed.linear"]) == ["time_embed.linear", "proj_out"]


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"targets": ["attn1.to_qq"]}, "matches no name in the model(.|\n)*attn1.to_q"),
        ({"targets": ["ff.conv_depth"]}, "groups"),
        ({"targets": ["patch_embed.proj"]}, "convolution of pictures"),
        ({"targets": ["norm1"]}, "matches no name"),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused(adapter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter_of(settings(**adapter), TINY)


@pytest.mark.parametrize("value", [{"rank": 0}, {"rank": -1}, {"alpha": 0.0}, {"dropout": 1.0}, {"targets": []}])
def test_values_that_mean_nothing_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(value))):
        settings(**value)


def test_adapter_and_only_are_two_answers() -> None:
    with pytest.raises(ValueError, match="not both"):
        TrainConfig.model_validate({"adapter": {}, "only": ["attn2"]})


def test_a_checkpoint_of_another_adapter_is_refused_in_a_few_words(tmp_path: Path) -> None:
    """Its targets are some hundred modules; those and what is equal hid the rank."""
    given = tiny_run.config(tmp_path, steps=1, adapter={"rank": 2})
    fit_tiny(given)
    for other, named in (
        ({"rank": 3, "alpha": 2.0}, "train.adapter.rank: the checkpoint has 2, this run 3"),
        ({"rank": 2, "targets": "all"}, "train.adapter.targets: the checkpoint has "),
        (None, "train.adapter: the checkpoint has {'kind': 'lora'"),
    ):
        with pytest.raises(CheckpointError) as caught:
            fit_tiny(tiny_run.config(tmp_path, steps=2, adapter=other), resume="auto")
        lines = str(caught.value).splitlines()
        assert lines[1].strip().startswith(named) and max(map(len, lines)) < 400
        assert "--from" not in lines[-1], "which refuses it, too"


# --------------------------------------------------------------------------------------------------------- start files


def diffusers_file(path: Path, trained: Mapping[str, Tensor], metadata: dict[str, Any] | None = None) -> Path:
    """As `save_lora_weights` writes it."""
    tensors = {}
    for name, value in trained.items():
        layer, _, part = name.rpartition(".")
        value = value if part == "lora_A" else deinterleave(f"{layer}.weight", value)
        ending = "lora_magnitude_vector" if part == "lora_magnitude" else f"{part}.weight"
        is_conv = "conv_" in layer and value.ndim == 2
        tensors[f"transformer.{layer}.{ending}"] = (value[..., None, None] if is_conv else value).contiguous().clone()
    header = {} if metadata is None else {"lora_adapter_metadata": json.dumps(metadata)}
    save_file(tensors, path, {"format": "pt", **header})
    return path


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_file_of_diffusers_is_continued(kind: str, tmp_path: Path) -> None:
    _, ours, _ = theirs_and_ours(tmp_path, kind, "all")
    trained = {name: p.detach() for name, p in ours.named_parameters() if p.requires_grad}
    named, name = {"transformer.r": 3, "transformer.lora_alpha": 5}, "pytorch_lora_weights.safetensors"
    path = diffusers_file(tmp_path / name, trained, named)
    adapter_of(settings(kind=kind, rank=3, targets="all", start=str(path)), TINY)
    again = make(TINY)
    adapter = adapted(again, settings(kind=kind, rank=3, alpha=6, targets="all", start=str(tmp_path)))
    for name, p in again.named_parameters():
        if p.requires_grad:
            p.data.copy_(adapter.initial(name, tuple(p.shape), 0, TINY.initial(0)))
    with torch.no_grad():
        assert tiny_run.distance({"x": again(*inputs((8, 8)))}, {"x": ours(*inputs((8, 8)))}) <= 1e-6
    adapter_of(settings(kind=kind, rank=3, targets="all", start="missing"), TINY, start=False)


def test_start_files_that_do_not_fit_name_their_keys(tmp_path: Path) -> None:
    _, ours, _ = theirs_and_ours(tmp_path, "lora", "all")
    trained = {name: p.detach() for name, p in ours.named_parameters() if p.requires_grad}
    half = dict(list(trained.items())[: len(trained) // 2])
    name = "transformer_blocks.0.attn1.to_q"
    values = {f"transformer.{name}.{part}": torch.zeros(2, 2) for part in ("lokr_w1", "lokr_w2")}
    save_file(values, tmp_path / "lokr")
    save_file({f"transformer.{name}.dora_scale": torch.zeros(2)}, tmp_path / "dora")
    save_file({"unet.down.lora_A.weight": torch.zeros(2)}, tmp_path / "another")
    (tmp_path / "text").write_text("no file")
    pattern = {"transformer.r": 3, "transformer.lora_alpha": 3, "transformer.rank_pattern": {name: 8}}
    files = {
        diffusers_file(tmp_path / "half", half): r"missing transformer\.transformer_blocks",
        tmp_path / "lokr": r"unexpected transformer(.|\n)*lokr_w1(.|\n)*model\.weights",
        tmp_path / "dora": r"unexpected transformer(.|\n)*dora_scale(.|\n)*model\.weights",
        tmp_path / "another": r"unexpected unet\.down",
        tmp_path / "text": "cannot be read",
        tmp_path / "nothing": "cannot be read",
        diffusers_file(tmp_path / "patterns", trained, pattern): r"rank_pattern(.|\n)*model\.weights",
        tmp_path / "prose": "lora_adapter_metadata is not a JSON",
        tmp_path / "number": "lora_adapter_metadata is not a JSON",
    }
    save_file(half, tmp_path / "prose", {"lora_adapter_metadata": "rank 8"})
    save_file(half, tmp_path / "number", {"lora_adapter_metadata": "8"})
    for path, message in files.items():
        with pytest.raises(UserError, match=message):
            adapter_of(settings(rank=3, targets="all", start=str(path)), TINY)
    good = diffusers_file(tmp_path / "good", trained)
    with pytest.raises(ConfigError, match=r"rank=3"):
        adapter_of(settings(rank=4, targets="all", start=str(good)), TINY)
    empty = {name: value[:0] if name.endswith("lora_A") else value[:, :0] for name, value in trained.items()}
    path = diffusers_file(tmp_path / "rank 0", empty)
    with pytest.raises(ConfigError, match=r"lora_A.weight(.|\n)*\[0, (.|\n)*give a file for this model"):
        adapter_of(settings(rank=3, targets="all", start=str(path)), TINY)
    with pytest.raises(ConfigError, match=r"magnitude(.|\n)*"):
        adapter_of(settings(kind="dora", rank=3, targets="all", start=str(good)), TINY)
    with pytest.raises(ConfigError, match=r"train\.adapter\.targets"):
        adapter_of(settings(rank=3, targets="attention", start=str(good)), TINY)


def trained_dora(folder: Path) -> dict[str, Tensor]:
    """An export of a DoRA of all layers."""
    base, module, adapter = TINY.initial(0), TINY.module(), adapter_of(settings(**DORA), TINY)
    assert adapter is not None
    adapter.apply(module)
    values = {n: adapter.initial(n, tuple(p.shape), 0, base) for n, p in module.named_parameters() if "lora_" in n}
    values = {name: value + 0.1 * torch.randn_like(value) for name, value in values.items()}
    folder.mkdir()
    adapter.save("diffusers", Merged(TINY, adapter, base, values), folder, torch.float32)
    return values


DORA: dict[str, Any] = {"kind": "dora", "rank": 2, "targets": "all"}


def started(place: Path) -> Mapping[str, Tensor]:
    """The first values of an adapter that starts from a place."""
    adapter, module, base = adapter_of(settings(**DORA, start=str(place)), TINY), TINY.module(), TINY.initial(0)
    assert isinstance(adapter, LoRA)
    adapter.apply(module)
    added = {name: tuple(p.shape) for name, p in module.named_parameters() if "lora_" in name}
    return {name: adapter.initial(name, shape, 0, base) for name, shape in added.items()}


def test_a_dora_of_all_layers_starts_from_its_export_and_from_a_folder_of_peft(tmp_path: Path) -> None:
    values = trained_dora(tmp_path / "export")
    given = started(tmp_path / "export")
    assert given.keys() == values.keys() and all(torch.allclose(given[name], values[name]) for name in values)
    tensors = load_file(tmp_path / "export" / files.DIFFUSERS_FILE)
    (tmp_path / "peft").mkdir()
    theirs = {f"base_model.model.{key.removeprefix('transformer.')}": value for key, value in tensors.items()}
    save_file(theirs, tmp_path / "peft/adapter_model.safetensors")
    (tmp_path / "peft/adapter_config.json").write_text('{"r": 2, "lora_alpha": 4, "use_dora": true}')
    given = started(tmp_path / "peft")
    for name, value in values.items():
        assert torch.allclose(given[name], value * (2 if name.endswith("lora_B") else 1)), name


def test_hostile_start_files_are_refused_by_name(tmp_path: Path) -> None:
    trained_dora(tmp_path / "export")
    file = tmp_path / "export" / files.DIFFUSERS_FILE
    tensors, data, key = load_file(file), file.read_bytes(), "transformer.transformer_blocks.0.attn1.to_k.lora_A.weight"
    bad, broken = tmp_path / "bad.safetensors", tmp_path / "broken.safetensors"

    def stored(change: dict[str, Tensor], **header: Any) -> Path:
        named = {f"transformer.{name}": value for name, value in {"r": 2, "lora_alpha": 2, **header}.items()}
        save_file({**tensors, **change}, bad, {"lora_adapter_metadata": json.dumps(named)})
        return bad

    changes = (torch.full_like(tensors[key], torch.nan), tensors[key].int(), torch.zeros(()), torch.zeros(2, 0))
    for value in changes:
        with pytest.raises(ConfigError, match=naming(bad.name, key)):
            started(stored({key: value}))
    for header in ({"lora_alpha": "x"}, {"r": 0}, {"lora_alpha": None}, {"r": -4, "use_rslora": True}, {"r": [2]}):
        with pytest.raises(ConfigError, match=naming(bad.name, "train.adapter.start")):
            started(stored({}, **header))
    (tmp_path / "empty").mkdir()
    for content in (b"", data[:9], data[:-1], pickle.dumps({}), b"[" * 10**5):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=naming(broken.name, "train.adapter.start")):
            started(broken)
    for place in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(UserError, match=naming(place.name, "train.adapter.start")):
            started(place)


def test_a_run_goes_on_without_its_start_file(tmp_path: Path) -> None:
    """The checkpoint has its values."""
    adapter = {"rank": 2, "targets": ["attn2.to_k"]}
    first = fit_tiny(tiny_run.config(tmp_path / "first", steps=1, adapter=adapter)).checkpoint
    assert first is not None
    trained = load_model_state(first)[1]
    names = {name.removeprefix("model."): value for name, value in trained.items() if name.startswith("model.")}
    parameters = names or trained
    start = diffusers_file(tmp_path / "start.safetensors", {n: v for n, v in parameters.items() if "lora_" in n})
    given = {**adapter, "start": str(start)}
    fit_tiny(tiny_run.config(tmp_path / "run", steps=1, adapter=given))
    fit_tiny(tiny_run.config(tmp_path / "whole", steps=2, adapter=given))
    start.unlink()
    fit_tiny(tiny_run.config(tmp_path / "run", steps=2, adapter=given), resume="auto")
    places = [tmp_path / name / "checkpoints/step-00000002" for name in ("run", "whole")]
    assert same_checkpoints(*places)
