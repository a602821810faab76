"""tercet evaluate: the loss is transformers', whatever the batch and the ranks; bytes are the text's; lm-eval's tasks."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests.served_tiny import save_served
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tercet.cli import app
from tercet.data.tokenizer import load
from tercet.errors import InputError, TercetError
from tercet.inference.evaluate import Work, add_up, byte_lengths, total
from tercet.inference.evaluate_ranks import evaluate
from tercet.inference.harness import Scorer
from tercet.inference.served import open_served

TEXTS = ["the for statement " * n + "模型🙂 half" * (n % 3) for n in (1, 2, 3, 9, 4, 1, 7, 5, 2, 11, 3)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_served(tmp_path_factory.mktemp("evaluated") / "tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def run(*arguments):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


@pytest.fixture(scope="module")
def work(folder, texts):
    from tercet.cli.evaluate import _prepare, _section

    ((rows, pad_id),) = _prepare([str(folder)], _section([str(texts)], []), 128)
    return Work(str(folder), rows, pad_id, dtype="fp64")


def test_the_loss_is_that_of_transformers_in_float64(folder, work):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats, tokens = 0.0, 0
    for text in TEXTS:
        ids = tokenizer(text).input_ids + [tokenizer.eos_token_id]
        assert ids[0] == tokenizer.bos_token_id and len(ids) <= 128
        ids = torch.tensor([ids])
        with torch.no_grad():
            scores = theirs(ids).logits[0, :-1].log_softmax(-1)  # their own loss rounds to fp32
        nats -= scores.gather(1, ids[0, 1:, None]).sum().item()
        tokens += ids.shape[1] - 1
    found = add_up(work)
    assert found.tokens == tokens
    assert found.nats == pytest.approx(nats, rel=1e-9)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_neither_batch_size_nor_shares_change_it(work, batch, ranks):
    whole = add_up(work)
    parts = [add_up(Work(work.model, work.rows, work.pad_id, batch, "fp64"), rank, ranks) for rank in range(ranks)]
    found = total(parts)
    assert (found.tokens, found.bytes) == (whole.tokens, whole.bytes)
    assert found.nats == pytest.approx(whole.nats, rel=1e-12)


def test_processes_share_it_and_one_that_fails_ends_all(work, tmp_path):
    seen = []
    found, whole = evaluate(work, 2, seen.append), add_up(work)
    assert found.nats == pytest.approx(whole.nats, rel=1e-12)
    assert sum(seen) == work.count
    with pytest.raises(TercetError, match="weights of nobody/nothing are not here"):
        evaluate(Work("nobody/nothing", work.rows, work.pad_id), 2)


def test_bytes_are_those_of_the_text(work, folder):
    assert add_up(work).bytes == sum(len(text.encode()) for text in TEXTS)
    tokenizer = load(folder)
    lengths = byte_lengths(tokenizer)
    for text in (*TEXTS, "\t\n\u0000 <|im_start|> é"):
        assert lengths[tokenizer.encode([text])[0]].sum() == len(text.encode())
    assert lengths[tokenizer.eos_id] == lengths[tokenizer.bos_id] == 0


def test_several_in_one_table(folder, texts, tmp_path):
    other = save_served(tmp_path / "other", seed=5)
    rows = json.loads(run(folder, other, "--data", texts, "--sequence", 128, "--json"))["models"]
    assert [row["model"] for row in rows] == [str(folder), str(other)]
    for row in rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["bits_per_byte"] == pytest.approx(row["loss"] * row["tokens"] / row["bytes"] / math.log(2))
    shown = run(folder, other, "--data", texts, "--sequence", 128).splitlines()
    assert f"{rows[1]['loss']:.4f}" in shown[3] and "%" in shown[3]


def test_what_cannot_be_evaluated_has_a_sentence(folder, texts, tmp_path):
    with pytest.raises(InputError, match="no run, which would bring validation data"):
        run(folder)
    with pytest.raises(InputError, match="--dtype is 'fp12'"):
        run(folder, "--data", texts, "--dtype", "fp12")
    with pytest.raises(InputError, match="device is 'gpu'"):
        run(folder, "--data", texts, "--device", "gpu")
    with pytest.raises(InputError, match=r"nothing\.txt"):
        run(folder, "--data", tmp_path / "nothing.txt")


def test_a_gguf_file_has_the_tokens_of_the_folder_it_was_made_of(folder, texts, tmp_path):
    """transformers' reader puts an unknown token behind those of the file; a full embedding has no row for it."""
    from tercet.inference.export import export_gguf

    exact = save_served(tmp_path / "exact", vocabulary=load(folder).size)
    export_gguf(str(exact), tmp_path / "exact.gguf", "fp32", lambda text: None)
    assert load(tmp_path / "exact.gguf").backend.get_vocab() == load(exact).backend.get_vocab()
    rows = json.loads(run(exact, tmp_path / "exact.gguf", "--data", texts, "--sequence", 128, "--json"))["models"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    assert rows[0]["tokens"] == rows[1]["tokens"]


def test_the_model_whose_tokenizer_does_not_fit_is_named(folder, texts, tmp_path):
    small = save_served(tmp_path / "small", vocabulary=64)
    with pytest.raises(InputError, match=r"small: its tokenizer has \d+ ids, but its embedding 64 rows") as told:
        run(folder, small, "--data", texts, "--sequence", 128)
    assert "model.vocabulary" not in str(told.value)


def test_keys_say_how_texts_are_read_and_the_advice_for_them_works(tmp_path):
    plain = save_served(tmp_path / "plain", template=None)
    chats, table = tmp_path / "chats.jsonl", tmp_path / "qa.csv"
    turns = [{"role": "user", "content": "the for"}, {"role": "assistant", "content": "statement"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    table.write_text("question,answer\nthe for,statement\n")
    with pytest.raises(InputError, match=r"data.template=NAME"):
        run(plain, "--data", chats)
    with pytest.raises(InputError, match=r"data.train.0.map=\{prompt: question, completion: answer\}"):
        run(plain, "--data", table)
    found = [
        json.loads(run(plain, *keys, "--json"))["models"][0]["bytes"]
        for keys in (
            ("data.template=plain", "--data", chats),
            ("--data", table, "data.train.0.map={text: question}"),
        )
    ]
    assert found == [len("statement"), len("the for")]


def test_keys_that_cannot_act_are_refused(folder, texts):
    with pytest.raises(InputError, match=r"data.templat has no part in evaluating; did you mean data.template\?"):
        run(folder, "data.templat=plain", "--data", texts)
    with pytest.raises(InputError, match="there is no --data"):
        run(folder, "data.bad_rows=skip")
    with pytest.raises(InputError, match=r"data.train has no source 1"):
        run(folder, "--data", texts, "data.train.1.map={text: q}")


# ---------------------------------------------------------------------------------------------------- lm-eval


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    pytest.importorskip("lm_eval")
    place = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:  # one split at a time, read in this process
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
        yield place


def choice_task(place, answers):
    rows = [{"q": f"the for statement {n} is", "choices": [" used", " a sequence", " over"]} for n in range(4)]
    data = place / "q.jsonl"
    data.write_text("".join(json.dumps({**r, "answer": a}) + "\n" for r, a in zip(rows, answers, strict=True)))
    file = place / "task.yaml"
    file.write_text(
        f"task: tiny_choice\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{answer}}'\n"
        "doc_to_choice: '{{choices}}'\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\nmetadata: {version: 1}\n"
    )
    return file, [(r["q"], r["choices"]) for r in rows]


@pytest.mark.slow
def test_a_task_from_local_files(folder, tasks):
    """The right answers of the file are what transformers finds most probable, but for the last one."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def logprob(question, answer):
        before, ids = len(tokenizer(question).input_ids), torch.tensor([tokenizer(question + answer).input_ids])
        scores = theirs(ids).logits.log_softmax(-1)[0, before - 1 : -1]
        return scores.gather(1, ids[0, before:, None]).sum().item()

    _, rows = choice_task(tasks, [0] * 4)
    best = [max(range(3), key=lambda n: logprob(q, choices[n])) for q, choices in rows]
    file, _ = choice_task(tasks, [*best[:3], (best[3] + 1) % 3])
    found = json.loads(run(folder, "--tasks", file, "--batch", 3, "--json"))
    assert found["models"][0]["tasks"]["tiny_choice"]["acc"] == 0.75
    assert "0.7500" in run(folder, "--tasks", file)


def test_scores_do_not_depend_on_what_stands_beside(folder):
    served = open_served(folder, "fp64")
    pairs = [("the for", " statement is"), ("", "模型"), ("a " * 300, " for"), ("is ", "used to iterate over")]
    one, all_ = Scorer(served, 1), Scorer(served, 4)
    made = [one.pair(*pair) for pair in pairs]
    assert made[3][1] == one.pair("is", " used to iterate over")[1]  # the space belongs to what follows
    for a, b in zip(one.score(made), all_.score(made), strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-12) and a[1] == b[1]


@pytest.mark.slow
def test_unknown_tasks_are_named(folder, tasks):
    with pytest.raises(InputError, match="there is no file"):
        run(folder, "--tasks", tasks / "none.yaml")
    (tasks / "bad.yaml").write_text("task: bad\ndataset_path: json\n")
    with pytest.raises(InputError, match=r"bad\.yaml"):
        run(folder, "--tasks", tasks / "bad.yaml")
