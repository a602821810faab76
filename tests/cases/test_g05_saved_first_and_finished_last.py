"""G05, G11: at the end of a run the save comes first; what fails after it costs nothing; finished means all is done."""

from __future__ import annotations

import json
import signal

import pytest

from tercet.training.checkpoint import fault_of, steps_in

STEPS = ("train.steps=4", "output.checkpoint_every=0", "train.evaluate_every=0")


def saved(cli, step: int = 4) -> None:
    folders = steps_in(cli.folder / "run" / "checkpoints")
    assert folders[0][0] == step
    assert fault_of(folders[0][1]) is None


def summary(cli) -> dict | None:
    path = cli.folder / "run" / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def warnings(cli) -> list[str]:
    return [e["message"] for e in cli.events("run", "warning")]


def break_on(rank: int, module: str, owner: str, name: str, error: str = "ValueError('broken')") -> str:
    return f"""
        import {module} as m
        plain = {owner}.{name}
        def broken(*args, **kwargs):
            if RANK == {rank}:
                raise {error}
            return plain(*args, **kwargs)
        {owner}.{name} = broken
    """


@pytest.mark.slow
def test_a_prompt_without_tokens_costs_no_training(cli):
    """A tokenizer that puts nothing before a text has nothing to begin an empty one with."""
    cli.inject("""
        from tercet.data.tokenizer import Tokenizer
        plain = Tokenizer.prompt
        Tokenizer.prompt = lambda self, text: plain(self, text)[len(self.before):]
    """)
    done = cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", *STEPS, 'train.sample_prompts=["The",""]')
    saved(cli)
    assert (cli.folder / "run" / "model" / "model.safetensors").is_file()
    assert [e["prompt"] for e in cli.events("run", "sample")] == ["The"]
    assert len(warnings(cli)) == 1 and "train.sample_prompts: ''" in warnings(cli)[0]
    assert "samples failed, training goes on" in done.stderr
    assert summary(cli)["failed"] == ["step 4: samples"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_an_evaluation_that_fails_on_one_rank(cli, rank):
    cli.inject(break_on(rank, "tercet.data.loader", "m.Loader", "evaluation"))
    done = cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", *STEPS, "strategy=zero2", code=1)
    saved(cli)
    assert (cli.folder / "run" / "model" / "model.safetensors").is_file(), "the model does not hang on it"
    assert f"rank {rank}: ValueError: broken" in warnings(cli)[0]
    assert "evaluation failed" in done.stderr and "--resume" in done.stderr
    assert summary(cli) is None, "not finished: its end is not done"
    cli.environment.pop("PYTHONPATH")
    cli.run("train", "--resume", "run")
    assert summary(cli)["validation_loss"] == cli.events("run", "evaluate")[-1]["validation_loss"]
    assert [e["step"] for e in cli.events("run", "step")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_an_export_that_fails(cli):
    cli.inject(break_on(0, "tercet.training.finish", "m", "save_folder", "OSError(5, 'Input/output error', 'model')"))
    done = cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", *STEPS, code=1)
    saved(cli)
    assert "the trained model could not be written: rank 0" in done.stderr and "Input/output error" in done.stderr
    assert summary(cli) is None
    cli.environment.pop("PYTHONPATH")
    cli.run("train", "--resume", "run")
    assert summary(cli)["finished"] and (cli.folder / "run" / "model" / "model.safetensors").is_file()
    assert len(cli.events("run", "evaluate")) == 1, "what was done is not done again"
    assert len(cli.events("run", "sample")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("place", ["SummaryWriter.__init__", "SummaryWriter.add_scalar", "SummaryWriter.close"])
def test_tensorboard_that_cannot_write(cli, place):
    owner, name = place.split(".")
    error = "UnicodeEncodeError('gbk', 'é', 0, 1, 'illegal multibyte sequence')"
    cli.inject(break_on(0, "torch.utils.tensorboard", f"m.{owner}", name, error))
    done = cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", *STEPS)
    assert "TensorBoard cannot be written, training goes on without it" in done.stderr
    assert len(warnings(cli)) == 1, "said once"
    assert summary(cli)["finished"]
    assert len(cli.events("run", "step")) == 4


@pytest.mark.parametrize(
    ("phase", "owner", "name"),
    [
        ("evaluation", "import tercet.engine.native as m; owner = m.NativeEngine", "evaluate"),
        pytest.param(
            "export", "import tercet.engine.native as m; owner = m.NativeEngine", "weights", marks=pytest.mark.slow
        ),
    ],
)
def test_a_signal_after_the_last_step_leaves_the_rest_to_the_next_session(cli, finished, phase, owner, name):
    cli.inject(f"""
        {owner}
        import pathlib, time
        plain, seen = owner.{name}, []
        def slow(self, *args, **kwargs):
            at_the_end = pathlib.Path('run/checkpoints/step-000030').exists()
            if RANK == 0 and at_the_end and not seen:
                seen.append(1)
                pathlib.Path('mark').touch()
                while not pathlib.Path('go').exists():
                    time.sleep(0.01)
                time.sleep(0.2)
            return plain(self, *args, **kwargs)
        owner.{name} = slow
    """)
    whole, run = finished
    process = cli.start("train", "small.yaml", "--ranks", "3", "--output", "run", "output.checkpoint_every=10")
    cli.wait_until((cli.folder / "mark").exists, process)
    process.send_signal(signal.SIGTERM)
    cli.wait_until(lambda: True)
    (cli.folder / "go").touch()
    done = cli.finish(process, 130)
    assert "saved" in done.stderr and "--resume" in done.stderr
    assert summary(cli) is None
    saved(cli, 30)
    cli.environment.pop("PYTHONPATH")
    cli.run("train", "--resume", "run")
    assert summary(cli)["finished"]
    assert summary(cli)["validation_loss"] == whole.events(run, "evaluate")[-1]["validation_loss"]
    assert cli.weights("run") == whole.weights(run)
    for kind in ("step", "evaluate", "sample"):
        assert [e["step"] for e in cli.events("run", kind)] == [e["step"] for e in whole.events(run, kind)], kind
