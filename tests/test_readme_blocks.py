"""The blocks of the README run as they are written: on the demonstration's models, in place of the released ones, and
with stand-ins for SLURM's commands that start two processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import SHIPPED
from pipeline.demo import photographs

ROOT = Path(__file__).parent.parent
LORA, FULL = "sana_1600m_1024_lora", "sana_1600m_1024"
SHORT: dict[str, Any] = {"microbatch": 4, "precision": "fp32", "activation_checkpointing": "none", "log_every": 1}
STAND_INS = {
    "sana-pipe": f"""exec "{sys.executable}" -m pipeline.cli "$@" """,
    "sbatch": """
if grep -q "^#SBATCH --array" "$1"; then
    export SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_MIN=0 SLURM_ARRAY_TASK_MAX=1 SLURM_ARRAY_TASK_COUNT=2 TASKS=1
    SLURM_ARRAY_TASK_ID=0 bash "$1" & SLURM_ARRAY_TASK_ID=1 bash "$1" && wait $!
else
    SLURM_JOB_ID=$$ TASKS=2 bash "$1"
fi""",
    "srun": """
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_TASKS_PER_NODE=$TASKS SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost
for ((task = 1; task < TASKS; task++)); do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && { [ "$TASKS" = 1 ] || wait $!; }""",
}


def blocks(heading: str) -> list[str]:
    """The commands under a heading of the README, block by block."""
    section = re.split(rf"^## {heading}$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    return re.findall(r"```bash\n(.*?)```", section.partition("\n## ")[0], flags=re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, tiny_repo: Path) -> Path:
    """A checkout with pictures in it, whose configurations name the demonstration's models and train two steps."""
    from diffusers import SanaTransformer2DModel

    for name in ("pipeline", "stages", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    tiny = yaml.safe_load((SHIPPED / "tiny.yaml").read_text(encoding="utf-8"))
    arch = tiny["model"]["arch"]
    width = arch["num_attention_heads"] * arch["attention_head_dim"]
    base = SanaTransformer2DModel(
        **arch, out_channels=arch["in_channels"], cross_attention_dim=width, sample_size=8, patch_size=1
    )
    base.save_pretrained(tmp_path / "base" / "transformer")
    for name in (LORA, FULL):
        shipped = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"))
        train = {key: shipped["train"][key] for key in ("output", "adapter") if key in shipped["train"]}
        drawn = {"validation": {"every": 1}, "pictures": {"every": 1}} if name == LORA else {}
        both = {
            "vae": {**tiny["vae"], "id": str(tiny_repo)},
            "text": {**tiny["text"], "id": str(tiny_repo)},
            "model": {"weights": {"id": str(tmp_path / "base"), "subfolder": "transformer"}},
            "bucket": {"batch": 64 if name == FULL else 4, "heldout": 0.3 if name == LORA else 0.0},
            "train": {**tiny["train"], **SHORT, **train, **drawn, "steps": 2},
        }
        (tmp_path / "configs" / f"{name}.yaml").write_text(yaml.safe_dump({**tiny, **both}))
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    photographs.demo_photos(tmp_path / "pictures")
    (tmp_path / "prompts.txt").write_text("a sks dog on a beach\na dog\n")
    return tmp_path


def walk(place: Path, block: str) -> str:
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RANK", "WORLD_"))}
    outside |= {"PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1", "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=place, env=outside, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_block_has_at_most_eight_commands() -> None:
    for heading in ("One card, your pictures", "A cluster"):
        for block in blocks(heading):
            assert 1 <= len(re.findall(r"^\S", block, flags=re.MULTILINE)) <= 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_card_as_written(place: Path) -> None:
    for block in blocks("One card, your pictures"):
        walk(place, block)
    assert (place / "lora" / "pytorch_lora_weights.safetensors").exists() and (place / "full/model_index.json").exists()
    assert (place / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_as_written(place: Path) -> None:
    [block] = blocks("A cluster")
    walk(place, block)
    assert (place / "export" / "model_index.json").exists()
