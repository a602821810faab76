"""Runs `tercet` as on Windows: the modules and functions that only Unix has are missing. Run by test_g43.

Libraries are loaded before: they have Windows builds of their own, and ours is what is tried here.
"""

import os
import signal
import sys
import sysconfig

import jinja2  # noqa: F401
import numpy  # noqa: F401
import orjson  # noqa: F401
import psutil  # noqa: F401
import pyarrow  # noqa: F401
import pydantic  # noqa: F401
import rich.progress  # noqa: F401
import tokenizers  # noqa: F401
import typer  # noqa: F401
import yaml  # noqa: F401

if {"generate", "prepare"} & set(sys.argv):
    import torch.nn.functional  # noqa: F401
    import transformers  # noqa: F401
sysconfig.get_config_vars()  # read from a file that is named after the platform
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
FUNCTIONS = ("geteuid", "getuid", "getgid", "getppid", "preadv", "pread", "fork", "setsid", "killpg", "mkfifo", "nice")
SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGQUIT")

for name in MODULES:
    sys.modules[name] = None  # importing it raises ImportError
for name in FUNCTIONS:
    delattr(os, name)
for name in SIGNALS:
    delattr(signal, name)
os.getppid = os.getpid  # Windows has this one
sys.platform = "win32"

from tercet.cli import main  # noqa: E402

main()
