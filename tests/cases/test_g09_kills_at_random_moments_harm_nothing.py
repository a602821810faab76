"""G07, G09, G12: kills and signals at random moments of a run, start-up, saves and end included, again and again.

After each: no process is left, no checkpoint is harmed or lost; at the end the weights are bit-equal to those of a
run that was never disturbed. `pytest --kills N --kill-seed S` sets how many and which.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
import uuid

import psutil
import pytest

from tercet.training.checkpoint import fault_of, steps_in
from tests.cli import Cli, gone

RUN = (
    "train.steps=16",
    "output.checkpoint_every=3",
    "train.evaluate_every=7",
    "output.keep=3",
    "train.sample_prompts=[]",
)
ADAPTERS = ("adapter.kind=lora", "adapter.rank=4", "adapter.targets=all-linear")
WAYS = ("kill supervisor", "kill a rank", "SIGTERM", "SIGHUP", "SIGINT")
# What a process answers that was asked to stop: it had finished, it stopped, or Python had not yet begun to listen.
ASKED = {0, 130, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}


class Disturbed:
    """One run that is killed again and again, and resumed each time."""

    def __init__(self, cli: Cli, ranks: int, lot: random.Random, keys: tuple[str, ...]):
        self.cli, self.ranks, self.lot, self.keys = cli, ranks, lot, keys
        self.folder = cli.folder / "run"
        self.mark = uuid.uuid4().hex
        cli.environment["TEST_MARK"] = self.mark
        self.newest = -1

    def start(self) -> subprocess.Popen[str]:
        if (self.folder / "recipe.yaml").exists():
            return self.cli.start("train", "--resume", "run")
        return self.cli.start("train", "small.yaml", "--ranks", str(self.ranks), "--output", "run", *self.keys)

    def processes(self) -> list[psutil.Process]:
        """Every process of this run, found by a variable that only it has inherited."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK") == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def disturb(self, way: str, seconds: float) -> None:
        process = self.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if way == "kill supervisor":
            process.kill()
            allowed = {0, -signal.SIGKILL}
        elif way == "kill a rank":
            children = psutil.Process(process.pid).children() if process.poll() is None else []
            if children:
                self.lot.choice(children).kill()
            allowed = {0, 1}
        else:
            process.send_signal(getattr(signal, way))
            allowed = ASKED
        done = self.cli.finish(process, None)
        assert process.returncode in allowed, f"{way} after {seconds:.2f} s: {process.returncode}\n{done.stderr}"
        assert "fault of Tercet" not in done.stderr
        assert gone(self.processes()), f"{way} after {seconds:.2f} s leaves {self.processes()}"
        self.check_checkpoints(way, seconds)

    def check_checkpoints(self, way: str, seconds: float) -> None:
        steps = steps_in(self.folder / "checkpoints")
        faults = [fault for _, folder in steps if (fault := fault_of(folder))]
        assert not faults, f"{way} after {seconds:.2f} s: {faults}"
        newest = steps[0][0] if steps else -1
        assert newest >= self.newest, f"{way} after {seconds:.2f} s: step {self.newest} was saved and is gone"
        self.newest = newest

    def finish(self) -> None:
        self.cli.finish(self.start())
        assert gone(self.processes())


def model_of(cli: Cli) -> dict[str, bytes]:
    """Return what was trained: the model's files, or the adapter's."""
    run = cli.folder / "run"
    return {p.name: p.read_bytes() for kind in ("model", "adapter") for p in (run / kind).glob("*.safetensors")}


def disturb_often(cli: Cli, tmp_path_factory, ranks: int, kills: int, seed: int, keys: tuple[str, ...] = RUN) -> None:
    whole = Cli(tmp_path_factory.mktemp("whole"), cli.folder)
    whole.environment["XDG_CACHE_HOME"] = cli.environment["XDG_CACHE_HOME"]
    begin = time.monotonic()
    whole.run("train", "small.yaml", "--ranks", str(ranks), "--output", "run", *keys)
    assert model_of(whole)
    duration = time.monotonic() - begin
    lot = random.Random(f"{seed} {ranks}")
    left, number = kills, 0
    while left:
        number += 1
        own = Cli(tmp_path_factory.mktemp(f"disturbed-{number}"), cli.folder)
        own.environment["XDG_CACHE_HOME"] = cli.environment["XDG_CACHE_HOME"]
        run = Disturbed(own, ranks, lot, keys)
        for _ in range(min(left, lot.randint(2, 5))):
            run.disturb(lot.choice(WAYS), lot.uniform(0, 1.1 * duration))
            left -= 1
        run.finish()
        assert model_of(own) == model_of(whole)
        assert own.losses("run") == whole.losses("run")


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_that_is_killed_again_and_again_ends_bit_equal(cli, tmp_path_factory, ranks, request):
    kills, seed = request.config.getoption("--kills"), request.config.getoption("--kill-seed")
    disturb_often(cli, tmp_path_factory, ranks, kills // 2, seed)


@pytest.fixture
def base(tmp_path_factory, text_cache) -> str:
    """A model folder to train adapters on."""
    cli = Cli(tmp_path_factory.mktemp("base"), text_cache)
    cli.run("train", "small.yaml", "--ranks", "1", "--output", "run", *RUN, "train.steps=2")
    return str(cli.folder / "run" / "model")


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["adapters", "host"])
def test_so_does_one_with_adapters_or_with_its_weights_in_host_memory(cli, base, tmp_path_factory, kind, request):
    keys = ("strategy=host",) if kind == "host" else (f"model={base}", "data.tokenizer=model", *ADAPTERS)
    kills, seed = request.config.getoption("--kills"), request.config.getoption("--kill-seed")
    disturb_often(cli, tmp_path_factory, 3, kills // 10, seed, (*RUN, *keys))
