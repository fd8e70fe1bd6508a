"""Wrong values in the `config.json` of any model are errors that name the file, the key, what is expected and found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sana_pipe.base.errors import ConfigError
from sana_pipe.train.models.prx import PRX
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.spec import ModelSpec, spec_at
from sana_pipe.train.models.zimage_config import ZImageConfig
from tests.support.messages import naming

MODELS: dict[str, ModelSpec] = {"Sana": SanaConfig(), "Z-Image": ZImageConfig(), "PRX": PRX()}
WRONG = (None, "3", -1, 0, 1.5, True, [], {}, [None], [-1, 65], ["a"], float("nan"), float("inf"), 10**400)
RIGHT = {
    "Sana": {
        *((name, None) for name in ("out_channels", "interpolation_scale", "qk_norm", "_class_name")),
        *(("_class_name", value) for value in ("[]", "{}", "0")),  # Sana's where there is none, as of older files
        *((name, "1.5") for name in ("mlp_ratio", "norm_eps", "interpolation_scale", "guidance_embeds_scale")),
        *((name, "0") for name in ("dropout", "guidance_embeds_scale")),
    },
    "Z-Image": {
        *((name, "1.5") for name in ("norm_eps", "rope_theta", "t_scale")),
        *(("n_refiner_layers", "0"), ("qk_norm", "True"), ("siglip_feat_dim", None)),
    },
    "PRX": {("mlp_ratio", "1.5"), ("time_factor", "1.5"), ("axes_dim", None), ("bottleneck_size", None)},
}
"""Values among those above that a field may have, as text (None: null)."""


def write(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_every_value_of_another_type_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    whole = MODELS[name].to_dict()
    assert spec_at(write(tmp_path, whole)) == MODELS[name]
    accepted = set()
    for key in whole:
        for value in WRONG:
            write(tmp_path, {**whole, key: value})
            try:
                spec_at(tmp_path)
                accepted.add((key, None if value is None else str(value)))
            except ConfigError as error:
                assert str(tmp_path / "config.json") in error.what, (key, value)
                assert key in str(error) or key == "_class_name", (key, value)
    assert accepted == RIGHT[name]


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("Z-Image", "axes_dims", None, "a list of whole numbers"),
        ("Z-Image", "n_layers", "30", "a whole number above 0"),
        ("Z-Image", "rope_theta", -256, "a number above 0"),
        ("Z-Image", "siglip_feat_dim", "no", "null"),
        ("PRX", "axes_dim", [32, "32"], "a list of whole numbers"),
        ("PRX", "depth", None, "a whole number above 0"),
        ("PRX", "time_factor", "1000", "a number above 0"),
        ("Sana", "num_layers", None, "a whole number above 0"),
        ("Sana", "qk_norm", 1, "a text or null"),
        ("Sana", "dropout", -0.5, "a number not below 0"),
    ],
)
def test_the_message_names_file_key_expected_and_found(
    name: str, key: str, value: Any, expected: str, tmp_path: Path
) -> None:
    write(tmp_path, {**MODELS[name].to_dict(), key: value})
    with pytest.raises(ConfigError) as caught:
        spec_at(tmp_path)
    error = caught.value
    assert str(tmp_path / "config.json") in error.what and key in error.what
    assert expected in str(error.expected) and error.found == repr(value)


@pytest.mark.parametrize(("name", "key"), [("Z-Image", "dim"), ("Z-Image", "axes_dims"), ("PRX", "hidden_size")])
def test_a_missing_key_has_diffusers_default_or_is_refused(name: str, key: str, tmp_path: Path) -> None:
    """The others here are half as wide, so the default does not fit them."""
    small = {
        "Z-Image": {"dim": 1920, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [16, 24, 24]},
        "PRX": {"hidden_size": 896, "num_heads": 14},
    }[name]
    whole = {**MODELS[name].to_dict(), **small}
    assert spec_at(write(tmp_path, whole)).inner_dim == MODELS[name].inner_dim // 2
    del whole[key]
    with pytest.raises(ConfigError, match=naming(tmp_path / "config.json", key)):
        spec_at(write(tmp_path, whole))
