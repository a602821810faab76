"""`python -m tercet` and the `tercet` command."""

import signal


def main() -> None:
    # Until the command line takes over, Ctrl-C ends the process as it ends any program: no traceback of an import.
    plain = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tercet import cli

    signal.signal(signal.SIGINT, plain)
    cli.main()


if __name__ == "__main__":
    main()
