"""lm-eval's tasks on our models. Tasks are names it knows, or .yaml files of its own form with data from local files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.errors import InputError, TercetError, nearest
from tercet.inference.generate import answers
from tercet.inference.sampling import Sampling
from tercet.inference.served import Served

ANSWER_TOKENS = 256  # of an answer, where the task does not say

Pair = tuple[list[int], list[int]]  # what is given, what is to be scored behind it


def find_tasks(names: Sequence[str]) -> dict[str, Any]:
    """Return lm-eval's tasks, groups and all. Raises InputError for a name or file it does not know, before a model is
    loaded."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval.tasks import TaskManager

    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    for file in files:
        if not Path(file).expanduser().is_file():
            raise InputError(f"--tasks: there is no file {file}")
    if not names:
        raise InputError("--tasks names no task", "For example: --tasks arc_easy, or --tasks my_task.yaml")
    manager = TaskManager(include_defaults=len(files) < len(names))
    known = set(manager.all_tasks)
    for name in names:
        if name not in files and name not in known:
            raise InputError(f"lm-eval knows no task {name!r}{nearest(name, known)}", "Or give a task's .yaml file.")
    try:
        return dict(manager.load([str(Path(n).expanduser().resolve()) if n in files else n for n in names]))
    except Exception as error:  # whatever a task's file or its data set brings up
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"--tasks {', '.join(names)}: {type(error).__name__}: {words[:300]}",
            "A task's data comes from the hub unless its file says dataset_path: json and names data_files.",
        ) from None


def evaluate_tasks(served: Served, tasks: dict[str, Any], batch: int, limit: int | None) -> dict[str, dict[str, Any]]:
    """Return task -> measure -> value, as lm-eval computes them."""
    from lm_eval import evaluator

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    wanted: list[Any] = list({**tasks["tasks"], **tasks.get("groups", {})}.values())
    try:
        run: Any = evaluator.simple_evaluate
        found = run(_model(served, batch), tasks=wanted, limit=limit, bootstrap_iters=0, log_samples=False)
    except TercetError:
        raise
    except Exception as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TercetError(f"lm-eval stopped: {type(error).__name__}: {words[:300]}") from error
    return {
        task: {
            key.removesuffix(",none"): value
            for key, value in measures.items()
            if isinstance(value, int | float)
            and not isinstance(value, bool)
            and key not in ("sample_len", "sample_count")
        }
        for task, measures in found["results"].items()
    }


def _model(served: Served, batch: int) -> Any:
    """Return lm-eval's view of a model. The class is made here: lm-eval is loaded when it is used."""
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    scorer = Scorer(served, batch)

    class Adapter(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return scorer.score([scorer.pair(*request.args) for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [self._rolling(request.args[0]) for request in requests]

        def _rolling(self, text: str) -> float:
            ids = served.tokenizer.encode([text])[0].tolist()
            windows = get_rolling_token_windows(ids, scorer.prefix, served.context_tokens, 1)
            return sum(value for value, _ in scorer.score([make_disjoint_window(w) for w in windows]))

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [scorer.answer(*request.args) for request in requests]

    return Adapter()


class Scorer:
    """Log-probabilities of continuations, `batch` texts side by side."""

    def __init__(self, served: Served, batch: int):
        self.served, self._batch = served, batch
        tokenizer = served.tokenizer
        # What stands before a text that has nothing before it: as in training, else the end of the text before.
        self.prefix = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id

    def pair(self, context: str, continuation: str) -> Pair:
        """Return the ids of both; the border falls where tokens of the whole text allow it, spaces go to the right."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, before = (self.served.prompt_ids(text) for text in (context + continuation, context))
        if not context:
            whole, before = [self.prefix, *self.served.tokenizer.encode([continuation])[0].tolist()], [self.prefix]
        return before, whole[len(before) :]

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return (log-probability, whether it is what greedy decoding gives) of each continuation, in their order."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda n: -len(pairs[n][0]) - len(pairs[n][1]))  # alike ones together
        for begin in range(0, len(order), self._batch):
            numbers = order[begin : begin + self._batch]
            for n, value in zip(numbers, self._scores([pairs[n] for n in numbers]), strict=True):
                found[n] = value
        return found

    @torch.no_grad()
    def _scores(self, pairs: list[Pair]) -> Iterator[tuple[float, bool]]:
        # The last token is predicted, not read; what is too long loses its beginning.
        inputs = [[*before, *after][:-1][-self.served.context_tokens :] for before, after in pairs]
        longest = max(map(len, inputs))
        device = next(self.served.model.parameters()).device
        # Padding comes behind: no token sees it.
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in inputs], device=device)
        logits: Tensor = self.served.model(ids)
        for row, (_, after), scores in zip(inputs, pairs, logits, strict=True):
            wanted = torch.tensor(after[-len(row) :], device=device)
            # Over all the model's ids, as in its loss.
            found = scores[len(row) - len(wanted) : len(row)].float().log_softmax(-1)
            values = found.gather(1, wanted[:, None])
            yield values.double().sum().item(), bool((found.argmax(-1) == wanted).all())

    def answer(self, prompt: str, settings: dict[str, Any]) -> str:
        """Return the text up to one of settings["until"]."""
        until = settings.get("until") or []
        warm = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
        limit = int(settings.get("max_gen_toks") or ANSWER_TOKENS)
        cut: Callable[[str], list[int]] = self.served.prompt_ids
        room = self.served.context_tokens - limit
        if len(ids := cut(prompt)) > max(room, 1):  # what is too long loses its beginning
            prompt = self.served.decode(ids[-max(room, 1) :])
        stops = [until] if isinstance(until, str) else until
        return answers(self.served, [prompt], limit, Sampling(temperature=warm), stops)[0].text
