"""`python -m tercet` and the `tercet` command."""

import os
import signal
import sys

from tercet.children import leave_out_working_directory


def main() -> None:
    # Until the command line takes over, Ctrl-C ends the process as it ends any program: no traceback of an import.
    plain = signal.signal(signal.SIGINT, signal.SIG_DFL)
    leave_out_working_directory()
    hold_standard_streams()
    from tercet import cli

    signal.signal(signal.SIGINT, plain)
    cli.main()


def hold_standard_streams() -> None:
    """Open what was closed at the start (`tercet train >&- 2>&-`) on the null device: the next file or pipe would get
    its number, and be written into by whoever prints."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has None for such a stream.
    sys.stdin, sys.stdout, sys.stderr = (
        sys.stdin or os.fdopen(0),
        sys.stdout or os.fdopen(1, "w"),
        sys.stderr or os.fdopen(2, "w"),
    )


if __name__ == "__main__":
    main()
