"""The ``moefw`` command, also as ``python -m moefw``."""

from moefw.commands.process import end_at_once_on_interrupt


def main() -> None:
    """Run the command line. Ctrl-C is answered before anything is imported that takes time."""
    end_at_once_on_interrupt()
    from moefw.cli import main as run

    run()


if __name__ == "__main__":
    main()
