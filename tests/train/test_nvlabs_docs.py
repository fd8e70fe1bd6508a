"""The table of docs/training.md agrees with the code on our side, and covers every option of NVlabs' trainer."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from sana_pipe.base.yaml_text import from_yaml
from sana_pipe.config import load, shipped
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models import flow_matching, sana_config
from sana_pipe.train.models.sana_config import numerics
from sana_pipe.train.models.sana_shape import DIFFUSERS
from sana_pipe.train.training import inputs
from sana_pipe.train.training.optimizers import came

PAGE = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
TEXT = PAGE.partition("\n## NVlabs' options and ours\n")[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| NVlabs |")
]
TRAIN = re.findall(
    r"\w+",
    """
    num_workers seed train_batch_size num_epochs gradient_accumulation_steps grad_checkpointing gradient_clip gc_step
    lr_schedule auto_lr ema_rate eval_batch_size use_fsdp use_flash_attn eval_sampling_steps lora_rank log_interval
    mask_type mask_loss_coef load_mask_index snr_loss real_prompt_ratio training_hours save_image_epochs
    save_model_epochs save_model_steps visualize null_embed_root valid_prompt_embed_root validation_prompts
    local_save_vis deterministic_validation online_metric eval_metric_step online_metric_dir work_dir skip_step
    loss_type huber_c num_ddim_timesteps w_max w_min ema_decay debug_nan
    train_sampling_steps predict_v noise_schedule pred_sigma learn_sigma flow_shift weighting_scheme logit_mean
    logit_std
""",
)
"""Fields of NVlabs' TrainingConfig and SchedulerConfig (diffusion/utils/config.py, commit 05ec9a7), but for `optimizer`
and `lr_schedule_args`, whose parts are rows, `vis_sampler` and `extra`."""


def _statements() -> list[tuple[str | None, str, str]]:
    """(configuration, option, value) of every `option = value` in the third column."""
    statements = []
    for row in ROWS:
        for text in re.findall(r"`([^`]+ = [^`]+)`", row[2]):
            name, _, statement = text.rpartition(": ")
            option, value = statement.split(" = ")
            statements.append((name or None, option, value))
    return statements


def _ours(name: str | None, option: str) -> Any:
    holders: dict[str, Any] = {"came": came, "flow_matching": flow_matching, "inputs": inputs, "Numerics": DIFFUSERS}
    holders["sana_config"] = sana_config
    first, *rest = option.split(".")
    start = holders[first] if first in holders else getattr(load(name or "sana_1600m_1024"), first)
    return reduce(getattr, rest, start)


@pytest.mark.parametrize(("name", "option", "value"), _statements())
def test_our_side_of_the_table_is_true(name: str | None, option: str, value: str) -> None:
    value_here, stated = _ours(name, option), from_yaml(value)
    assert (list(value_here) if isinstance(value_here, tuple) else value_here) == stated


def test_no_option_of_theirs_is_left_out() -> None:
    assert len(ROWS) > 40
    assert all(len(row) == 4 for row in ROWS)
    named = set(re.findall(r"`([a-z0-9_.]+)`", " ".join(row[0] for row in ROWS)))
    assert not set(TRAIN) - named
    assert {f"optimizer.{part}" for part in ("type", "lr", "betas", "eps", "weight_decay")} <= named
    assert "lr_schedule_args.num_warmup_steps" in named


def test_what_the_numerics_changes_is_what_the_table_says() -> None:
    nvlabs = numerics(TrainConfig(numerics="nvlabs"))
    marked = [row for row in ROWS if "*numerics*" in row[3]]
    assert len(marked) == 6
    for stated, value in (("*numerics* 1e-8", nvlabs.attention_eps), ("*numerics* 1e-6", nvlabs.cross_norm_eps)):
        assert float(stated.split()[1]) == value
        assert any(stated in row[3] for row in marked)


def test_the_options_that_train_as_they_do_are_options() -> None:
    command = re.search(r"    sana-pipe train (.*?)\n\n", TEXT, flags=re.DOTALL)
    assert command is not None
    config = load("sana_1600m_1024", re.findall(r"--set (\S+)", command[1]))
    assert (config.train.numerics, config.train.optim.name) == ("nvlabs", "came")
    assert config.train.optim.lr == 1e-4 * (config.bucket.batch / 256) ** 0.5


def test_named_tests_and_files_exist() -> None:
    defined = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert all(f"def {name}(" in defined for name in re.findall(r"`(test_[a-z0-9_]+)`", TEXT))
    assert {name for name, _, _ in _statements() if name} <= {path.stem for path in shipped()}
