"""Writes an Accelerate file that works, from what was read: the keys that act, and nothing else."""

from __future__ import annotations

from pathlib import Path

import yaml

from tercet.errors import InputError
from tercet.planner.launcher_files.read import LauncherFile

HEADER = """\
# Written by: tercet plan --accelerate-config {source} --write {target}
# Start with: accelerate launch --config_file {target} -m tercet train RECIPE {overrides}
# Accelerate starts the processes; what runs is the recipe.
"""


def accelerate_file(found: LauncherFile) -> dict:
    """Return the mapping of an Accelerate file with the reading's meaning; three processes unless it says."""
    content: dict = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED"}
    section: dict = {
        "zero_stage": found.zero,
        "gradient_accumulation_steps": found.accumulation or 1,
        "offload_optimizer_device": found.offload_optimizer,
    }
    if found.zero == 3:
        section |= {"offload_param_device": found.offload_weights, "zero3_init_flag": False}
    for what in ("optimizer", "param"):
        if found.nvme_path and section.get(f"offload_{what}_device") == "nvme":
            section[f"offload_{what}_nvme_path"] = found.nvme_path
    content["deepspeed_config"] = section
    if found.precision:  # left open: accelerate takes no, and the recipe's format counts
        content["mixed_precision"] = "no" if found.precision == "fp32" else found.precision
    return content | {"num_machines": 1, "machine_rank": 0, "num_processes": found.ranks or 3}


def write_accelerate(found: LauncherFile, target: str, overrides: list[str]) -> None:
    """Write the file, with the recipe keys that say the same. Raises InputError when it exists or cannot be written."""
    path = Path(target).expanduser()
    header = HEADER.format(source=found.path, target=target, overrides=" ".join(overrides))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(header + yaml.safe_dump(accelerate_file(found), sort_keys=False))
    except FileExistsError:
        raise InputError(f"--write {target}: the file exists already", "Give another name.") from None
    except OSError as error:
        raise InputError(f"--write {target}: {error.strerror}") from None
