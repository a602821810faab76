"""A console that is gone changes no exit code: what is left in a buffer cannot be written, and that is all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITH_A_LINE_LEFT = """
import os, sys
from tercet import cli
from tercet.errors import InterruptedRun
def app():
    stream = getattr(sys, {name!r})
    stream.reconfigure(line_buffering=False)
    stream.write("left in the buffer")
    raise InterruptedRun("saved")
cli.app = app
cli.main()
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_the_exit_code_is_the_commands(name):
    reading, writing = os.pipe()
    os.close(reading)
    code = WITH_A_LINE_LEFT.format(name=name)
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=writing, timeout=60, env=buffered)
    os.close(writing)
    assert done.returncode == 130
