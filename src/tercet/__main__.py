"""`python -m tercet` and the `tercet` command."""

import signal

from tercet.children import leave_out_working_directory


def main() -> None:
    # Until the command line takes over, Ctrl-C ends the process as it ends any program: no traceback of an import.
    plain = signal.signal(signal.SIGINT, signal.SIG_DFL)
    leave_out_working_directory()
    from tercet import cli

    signal.signal(signal.SIGINT, plain)
    cli.main()


if __name__ == "__main__":
    main()
