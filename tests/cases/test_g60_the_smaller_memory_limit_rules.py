"""G60: a control group's limit (v1, v2) or ulimit -v below the machine's memory rules, before a run and after."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tercet.spec.memory_limit import memory_limit
from tests.cli import LIMIT_SECONDS

GIB = 2**30


def tree(root, cgroup: str, files: dict[str, str]):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/user/job\n", {"user/job/memory.max": "4294967296\n"}, 4 * GIB),
        ("0::/user/job\n", {"user/job/memory.max": "max\n", "user/memory.max": "2147483648\n"}, 2 * GIB),
        ("0::/user/job\n", {"user/job/memory.max": "8589934592\n", "user/memory.max": "2147483648\n"}, 2 * GIB),
        ("0::/../../host/path\n", {"memory.max": "1073741824\n"}, GIB),  # a container sees its own group at the top
        ("5:memory:/docker/x\n4:cpu:/\n", {"memory/docker/x/memory.limit_in_bytes": "3221225472\n"}, 3 * GIB),
        ("5:cpu,memory:/docker/x\n", {"memory/memory.limit_in_bytes": "3221225472\n"}, 3 * GIB),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_groups_limit_is_found(tmp_path, cgroup, files, limit):
    found = memory_limit(1, tree(tmp_path, cgroup, files))
    assert (found.bytes if found else None) == limit
    if found:
        assert str(tmp_path / "sys/fs/cgroup") in found.source


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_each_process_counts_once_a_rank(tmp_path, monkeypatch, kind):
    """setrlimit(2) limits a process, a control group all of them: three ranks may have three times the first."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda n: (2 * GIB, 2 * GIB) if n == kind else unlimited)
    assert memory_limit(1, tmp_path).bytes == 2 * GIB
    assert memory_limit(3, tmp_path).bytes == 6 * GIB
    root = tree(tmp_path, "0::/\n", {"memory.max": str(5 * GIB)})
    assert [memory_limit(n, root).bytes for n in (1, 2, 3)] == [2 * GIB, 4 * GIB, 5 * GIB]


def limited(cli, bytes_, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tercet", *arguments],
        cwd=cli.folder, env=cli.environment, text=True, capture_output=True, timeout=LIMIT_SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_)),
    )  # fmt: skip


def test_a_plan_over_ulimit_is_refused_with_the_figures_before_anything_starts(cli):
    keys = ("model={layers: 2, width: 8192, heads: 64, ffn: 22528, vocabulary: 32000}", "data.validation=none")
    done = limited(cli, 6 * GIB, "train", "small.yaml", *keys, "--ranks", "1", "--output", "run")
    assert done.returncode == 3, done.stderr
    assert "6.0 GiB are there (limited by ulimit -v (6291456 KiB for each process))" in done.stderr
    assert "Traceback" not in done.stderr and not (cli.folder / "run").exists()


@pytest.mark.slow
def test_a_killed_ranks_hint_names_the_limit(cli):
    cli.inject("""
        import signal
        import tercet.engine.native as m
        def step(self, *args):
            os.kill(os.getpid(), signal.SIGKILL)
        m.NativeEngine.step = step
    """)
    done = limited(cli, 20 * GIB, "train", "small.yaml", "--ranks", "1", "--output", "run")
    assert done.returncode == 1, done.stderr
    assert "rank 0 was killed by signal 9" in done.stderr
    assert "20.0 GiB allowed by ulimit -v" in done.stderr and "were planned" in done.stderr
