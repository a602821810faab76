"""What a run writes replaces nobody's files, asks for the room it needs, and is whole before the run ends."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from tests.loops import Dealt, loop_of
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

from tercet.engine.scaling import LossScale
from tercet.errors import InputError, TercetError
from tercet.parallel.world import World
from tercet.planner.job import of_strategy
from tercet.planner.ledger import save_bytes
from tercet.spec.recipe import build_recipe
from tercet.spec.run_folder import RunFolder
from tercet.spec.strategy import Work
from tercet.training.assembly import _begins_again
from tercet.training.bench import row_of
from tercet.training.disk import remove_leftovers
from tercet.training.finish import _own_tokenizer, _peaks
from tercet.training.loop import Progress
from tercet.training.pace import stopping_line
from tercet.training.session import (
    FIXED_ON_RESUME,
    _short_of_disk,
    begun,
    changed_keys,
    new_run,
    refuse_changes,
    remove_start,
)
from tercet.training.trained import TrainedModel
from tercet.weights.writing import copy_tokenizer

ALONE = World(0, 1, 0, torch.device("cpu"))
ROWS = 3


@pytest.mark.parametrize("name", ["model", "adapter"])
def test_a_model_that_no_run_made_is_not_replaced(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_bytes(b"of years")
    with pytest.raises(InputError, match=f"holds {name}/, which no run"):
        new_run(build_recipe({"data": {"train": "x"}}), str(tmp_path))
    (tmp_path / name).rename(tmp_path / "base")
    (tmp_path / name).symlink_to(tmp_path / "base")
    with pytest.raises(InputError, match=f"holds {name}/"):
        new_run(build_recipe({"data": {"train": "x"}}), str(tmp_path))
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == b"of years"


@pytest.mark.parametrize(
    "name", ["plan.json", "tokenizer/tokenizer.json", "sources.json", "tensorboard/x", "report.html"]
)
def test_a_folder_with_files_under_a_runs_names_is_not_taken(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"somebody's")
    with pytest.raises(InputError, match=name.partition("/")[0]):
        new_run(build_recipe({"data": {"train": "x"}}), str(tmp_path))
    remove_start(RunFolder(tmp_path))
    assert (tmp_path / name).read_bytes() == b"somebody's"


def test_a_start_of_ours_is_taken_over(tmp_path):
    for name in ("recipe.yaml", "plan.json", "data.json", "report.html"):
        (tmp_path / name).write_bytes(b"{}")
    assert new_run(build_recipe({"data": {"train": "x"}}), str(tmp_path)) == (RunFolder(tmp_path), False)


def test_what_a_save_left_goes_and_what_it_was_to_replace_stays(tmp_path):
    run = RunFolder(tmp_path)
    for name in (
        ".model.tmp",
        ".model.replaced.tmp",
        "checkpoints/.step-000004.tmp",
        "checkpoints/step-000004",
        ".my.tmp",
    ):
        (tmp_path / name).mkdir(parents=True)
    remove_leftovers(run)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"checkpoints", "checkpoints/step-000004", "model", ".my.tmp"}


def test_a_restart_is_known_though_it_undoes_an_earlier_one(tmp_path):
    run = RunFolder(tmp_path)

    def write(*rows: tuple[str, int, float]) -> None:
        run.events.write_text("".join(f'{{"event":"{e}","step":{s},"time":{t}}}\n' for e, s, t in rows))

    write(("start", 0, 1.0), ("resume", 20, 2.0))
    before = begun(run)
    write(("start", 0, 1.0), ("resume", 10, 3.0))  # of an earlier checkpoint: the one at step 20 is forgotten
    assert not begun(run) <= before
    write(("start", 0, 1.0))
    assert begun(run) <= before


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("model", "model.layers=3"),
        ("data", "data.sequence_tokens=64"),
        ("train.seed", "train.seed=5"),
        ("train.batch_sequences", "train.batch_sequences=8"),
        ("train.freeze", "train.freeze=[lm_head]"),
        ("adapter", "adapter.kind=lora"),
    ],
)
def test_what_decides_a_run_is_not_changed_when_it_goes_on(part, key):
    assert part in FIXED_ON_RESUME
    before = build_recipe({"model": "first-light", "data": {"train": "x"}})
    after = build_recipe({"model": "first-light", "data": {"train": "x"}}, [key, "optim.lr=1e-5"])
    with pytest.raises(InputError) as refused:
        refuse_changes(changed_keys(before, after))
    assert key.partition("=")[0] in refused.value.message and "optim.lr" not in refused.value.message


def test_a_command_that_goes_on_is_read_by_a_shell_as_it_was_meant(tmp_path):
    place = tmp_path / "my run; of today"
    assert shlex.split(RunFolder(place).resume) == ["tercet", "train", "--resume", str(place)]


@pytest.mark.parametrize(
    ("word", "precision", "optimizer"),
    [("single", "fp32", "adamw"), ("single", "bf16", "adamw"), ("single", "bf16-pure", "adamw-8bit")],
)
def test_the_room_asked_for_a_save_is_what_it_holds(tmp_path, word, precision, optimizer):
    model = tiny_model(width=256, heads=4, ffn=512)
    strategy = tiny_strategy(word, 1, ROWS, 1)
    engine = tiny_engine(ALONE, strategy, precision, model, name=optimizer)
    engine.step(micro_batches(0, 0, 1, 1, ROWS), 1e-2)
    engine.save(tmp_path).wait()
    held = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    asked = save_bytes(model.trained_parameters, of_strategy(strategy, Work(16, ROWS, precision, optimizer)))
    assert held == pytest.approx(asked, rel=0.05)


def test_a_loss_that_is_not_finite_says_nothing_of_the_scale():
    engine = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, 1), "fp16")
    engine._scaler = LossScale(2.0**10, 999)
    engine.module.model.norm.register_forward_hook(lambda module, inputs, out: out * float("nan"))
    assert not engine.step(micro_batches(0, 0, 1, 1, ROWS), 1e-2).updated
    assert engine._scaler == LossScale(2.0**10, 999)


@pytest.mark.parametrize(("name", "precision"), [("adamw", "fp32"), ("adamw-8bit", "fp32"), ("adamw", "bf16-pure")])
def test_a_skipped_step_leaves_no_trace_in_the_next_nor_after_resuming(tmp_path, name, precision):
    """AdamW's correction of its first moments and the chances of rounding follow updates, not steps."""
    strategy, model = tiny_strategy("single", 1, ROWS, 1), tiny_model(width=64)
    plain, skipping, resumed = (tiny_engine(ALONE, strategy, precision, model, name=name) for _ in range(3))
    first, bad, second = (micro_batches(n, 0, 1, 1, ROWS) for n in (0, 1, 2))
    plain.step(first, 1e-2), skipping.step(first, 1e-2)
    hook = skipping.module.model.norm.register_forward_hook(lambda module, inputs, out: out * float("nan"))
    assert not skipping.step(bad, 1e-2).updated
    hook.remove()
    skipping.save(tmp_path).wait()
    resumed.load(tmp_path)
    for engine in (plain, skipping, resumed):
        engine.step(second, 1e-2)
    expected = whole_weights(plain)
    for engine in (skipping, resumed):
        assert all(torch.equal(tensor, expected[key]) for key, tensor in whole_weights(engine).items())


def test_a_save_has_the_validation_loss_of_its_own_weights_or_none():
    loop, saved = loop_of(ALONE, None, Dealt(ROWS), 9), []
    loop.checkpoints = SimpleNamespace(save=lambda engine, state: saved.append(state))  # type: ignore[assignment]
    for step, validated_step in ((4, 4), (5, 4)):
        loop.progress = Progress(step=step, validation_loss=2.5, validated_step=validated_step)
        loop._save()
    assert [(s["step"], s["validation_loss"]) for s in saved] == [(4, 2.5), (5, None)]


def test_a_save_behind_the_steps_is_whole_before_a_bad_step_ends_the_run():
    engine = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, 1))
    engine.module.model.norm.register_forward_hook(lambda module, inputs, out: out * float("nan"))
    loop = loop_of(ALONE, engine, Dealt(ROWS), 3)
    finished = []
    loop.checkpoints = SimpleNamespace(finish=lambda: finished.append(loop.progress.step))  # type: ignore[assignment]
    with pytest.raises(TercetError, match="stopped before the update"):
        loop._step()
    assert finished == [1]


def refused_by_rank_0(world: World, folder, tensors_first: int):
    """Rank 0 cannot write, before the first tensor or after some; return what each rank is told."""
    engine = tiny_engine(world, tiny_strategy("zero3", world.size, ROWS, 1))

    def save(target, tensors) -> None:
        for _ in range(tensors_first):
            next(tensors)
        raise OSError(28, "No space left on device")

    return str(TrainedModel(folder / "model", world, engine, save, lambda: False).attempt(1))


@pytest.mark.parametrize("tensors_first", [0, 2])
@pytest.mark.timeout(60)
def test_all_ranks_hear_that_the_model_cannot_be_written(pools, tmp_path, tensors_first):
    told = pools[3].run(refused_by_rank_0, tmp_path, tensors_first)
    assert len(set(told)) == 1 and "No space left" in told[0]


def test_the_model_gets_the_runs_own_tokenizer_though_the_cache_is_gone(tmp_path):
    built = SimpleNamespace(run=RunFolder(tmp_path), prepared=SimpleNamespace(tokenizer_folder=tmp_path / "cleared"))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "model").mkdir()
    copy_tokenizer(_own_tokenizer(built), tmp_path / "model")  # type: ignore[arg-type]
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"


def test_a_request_to_stop_after_the_last_step_promises_no_further_one(tmp_path):
    run, now = RunFolder(tmp_path), time.time()
    events = [{"event": "start", "step": 0, "time": now, "total_steps": 3}]
    events += [{"event": "step", "step": n, "time": now, "seconds": 1.0} for n in (1, 2)]
    run.events.write_text("".join(json.dumps(e) + "\n" for e in events))
    assert "finishing step 3" in stopping_line(run, now - 1)
    with run.events.open("a") as file:
        file.write(json.dumps({"event": "step", "step": 3, "time": now, "seconds": 1.0}) + "\n")
    assert "every step is done" in stopping_line(run, now - 1) and "step 4" not in stopping_line(run, now - 1)


def test_a_disk_without_room_is_said_before_the_first_step(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert _short_of_disk(RunFolder(tmp_path), {"disk_bytes": free // 2}) is None
    assert "are free in" in (_short_of_disk(RunFolder(tmp_path), {"disk_bytes": 2 * free}) or "")


def test_a_resumed_runs_peak_is_that_of_all_its_starts():
    steps = [{"memory_bytes": 800}, {"memory_bytes": None}, {"memory_bytes": 300}]
    assert _peaks([385, 390], steps) == [800, 390] and _peaks([900, 10], steps) == [900, 10]


def test_a_bench_takes_its_peak_before_it_profiles(tmp_path):
    run = RunFolder(tmp_path)
    run.plan.write_text(json.dumps({"name": "single", "micro_batch": 1, "accumulation": 1}))
    run.summary.write_text(json.dumps({"device": "cpu", "peak_bytes_per_rank": [994], "train_loss": 1.0}))
    held = [400, 471, 485, 567, 624, 994]
    events = [
        {"event": "step", "step": n, "time": 0.0, "seconds": 1.0, "tokens_per_second": 9.0, "memory_bytes": m}
        for n, m in enumerate(held, 1)
    ]
    run.events.write_text("".join(json.dumps(e) + "\n" for e in events))
    assert row_of(run, 1, 1, 2)["peak_bytes"] == 485


@pytest.mark.slow
def test_fewer_steps_than_are_done_are_refused_and_the_record_stays(cli):
    cli.run("train", "small.yaml", "--ranks", "1", "--output", "run", "train.steps=4")
    files = [cli.folder / "run" / name for name in ("recipe.yaml", "plan.json", "summary.json")]
    before = [file.read_bytes() for file in files]
    refused = cli.run("train", "--resume", "run", "train.steps=3", code=2)
    assert "train.steps: 3 steps are asked for, and 4 are done" in refused.stderr
    assert [file.read_bytes() for file in files] == before


def test_a_run_whose_checkpoints_are_gone_does_not_replace_what_it_trained(tmp_path):
    run, said = RunFolder(tmp_path), []
    _begins_again(run, said.append)
    assert said == []
    run.events.write_text('{"event":"start","step":0,"time":1.0}\n')
    _begins_again(run, said.append)
    run.events.write_text('{"event":"start","step":0,"time":1.0}\n{"event":"checkpoint","step":2,"time":2.0}\n')
    _begins_again(run, said.append)
    assert ["published" in text for text in said] == [True, False] and "are gone" in said[1]
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        with pytest.raises(InputError, match=f"{name}/ holds what it has trained"):
            _begins_again(run, said.append)
        (tmp_path / name).rmdir()
