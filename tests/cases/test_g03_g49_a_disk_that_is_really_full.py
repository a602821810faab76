"""G03, G49: on a small disk that is full nothing that was saved is lost, and waiting goes on once there is room."""

from __future__ import annotations

import subprocess

import pytest

from tercet.training.checkpoint import fault_of, steps_in

pytestmark = pytest.mark.slow
DISK_BYTES = 8 * 2**20
RUN = ("--ranks", "2", "--output", "disk/run", "train.steps=24", "train.evaluate_every=0", "train.sample_prompts=[]")
SAVES = ("output.checkpoint_every=4", "output.keep=2")


@pytest.fixture
def disk(cli):
    folder = cli.folder / "disk"
    folder.mkdir()
    size = f"size={DISK_BYTES}"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"a small disk needs the right to mount: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder) -> None:
    """Leave no byte free."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def filled_after_a_save(cli, disk):
    process = cli.start("train", "small.yaml", *RUN, *SAVES, "output.disk_full=wait")
    cli.wait_until(lambda: bool(steps_in(disk / "run" / "checkpoints")), process)
    fill(disk)
    return process


def undamaged(disk) -> int:
    steps = steps_in(disk / "run" / "checkpoints")
    assert steps and not [fault for _, folder in steps if (fault := fault_of(folder))]
    return steps[0][0]


def test_waiting_goes_on_by_itself(cli, disk):
    process = filled_after_a_save(cli, disk)
    assert process.stderr is not None
    for line in process.stderr:  # until it says so; the pipe ends with the run
        if "waiting until there is space" in line:
            break
    else:
        raise AssertionError("the run ended without waiting")
    undamaged(disk)
    (disk / "filler").unlink()
    cli.finish(process, 0)
    assert undamaged(disk) == 24
    same_as_undisturbed(cli)


def same_as_undisturbed(cli) -> None:
    cli.run("train", "small.yaml", *("whole" if word == "disk/run" else word for word in RUN), *SAVES)
    assert cli.weights("disk/run") == cli.weights("whole")


def test_stopping_says_what_stopped_it_with_no_byte_left(cli, disk):
    stop = (*RUN, *SAVES, "output.disk_full=stop")
    process = cli.start("train", "small.yaml", *stop)
    cli.wait_until(lambda: bool(steps_in(disk / "run" / "checkpoints")), process)
    fill(disk)
    done = cli.finish(process, 1)
    assert "disk full: " in done.stderr and "tercet train --resume" in done.stderr, done.stderr
    saved = undamaged(disk)
    (disk / "filler").unlink()
    cli.run("train", "--resume", "disk/run")
    assert undamaged(disk) == 24 > saved
    same_as_undisturbed(cli)
