"""B09: every line is checked beforehand; line, column and excerpt are given, blank lines are none."""

from __future__ import annotations

import pytest

from tercet.errors import InputError
from tests.texts import documents, made, sentence


@pytest.fixture
def path(tmp_path):
    lines = [f'{{"text": "{sentence(n)}"}}' for n in range(9)]
    lines[4] = lines[4][:-1] + ","  # a trailing comma, and the brace is gone
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(lines) + "\n   \n", encoding="utf-8")
    return file


def test_stop_names_the_line(tmp_path, path):
    with pytest.raises(InputError) as error:
        made(tmp_path, path)
    assert error.value.exit_code == 2
    column = len(f'{{"text": "{sentence(4)}",') + 1
    assert f"{path}, line 9, column {column}: bad JSON" in str(error.value)  # every second line is blank
    assert "1 of 9 rows cannot be used" in str(error.value)
    assert ">>" in str(error.value) and sentence(4)[-20:] in str(error.value)
    assert "data.bad_rows=skip" in str(error.value)
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_skip_uses_the_other_eight(tmp_path, path):
    prepared = made(tmp_path, path, bad_rows="skip")
    assert prepared.report["rows"] == {"read": 9, "train": 8, "validation": 0, "dropped": 1}
    assert prepared.report["seen"]["blank lines"] == 9
    assert len(documents(prepared)) >= 8


def test_all_faults_are_counted_not_only_the_first(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n' + "nonsense\n" * 25 + '{"text": ""}\n' * 3)
    with pytest.raises(InputError, match=r"28 of 29 rows cannot be used \(25 bad JSON, 3 empty text\)") as error:
        made(tmp_path, path)
    assert "… and 18 more" in str(error.value)


def test_a_fault_in_the_last_of_several_files_stops_before_any_token(tmp_path):
    (tmp_path / "f").mkdir()
    for n in range(3):
        (tmp_path / "f" / f"{n}.jsonl").write_text(
            '{"text": "good text"}\n' if n < 2 else '{"text": "good"}\n{"text"\n'
        )
    phases = set()
    from tercet.data.prepare import prepare
    from tests.texts import section

    with pytest.raises(InputError, match=r"2\.jsonl, line 2, column 8"):
        prepare(
            section(tmp_path, tmp_path / "f"),
            vocabulary=300,
            model_tokenizer=None,
            seed=0,
            progress=lambda done, total, phase: phases.add(phase),
        )
    assert phases == {"hash", "check"}
