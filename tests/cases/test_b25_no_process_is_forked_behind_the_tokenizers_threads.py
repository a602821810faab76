"""B25: after the tokenizer's threads have run in the parent, preparing long rows in children ends, with
equal tokens.
"""

from __future__ import annotations

import multiprocessing

from tests.texts import documents, made, sentence, write_rows

LIMIT = 60  # seconds; only a hang reaches it


def work(folder, path, answers):
    answers.put(documents(made(folder, path, sequence_tokens=512)))


def test_parent_first_then_two_workers(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [sentence(n, 8000) for n in range(3)])
    assert path.stat().st_size > 3 * 40_000
    expected = documents(made(tmp_path, path, sequence_tokens=512))
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        answers = context.Queue()
        workers = []
        for n in range(2):
            (tmp_path / f"{method}{n}").mkdir()
            workers.append(context.Process(target=work, args=(tmp_path / f"{method}{n}", path, answers), daemon=True))
        for worker in workers:
            worker.start()
        assert [answers.get(timeout=LIMIT) == expected for _ in workers] == [True, True]
        for worker in workers:
            worker.join(LIMIT)
            assert worker.exitcode == 0
