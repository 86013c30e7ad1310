"""``python -m moefw``."""

from moefw.cli import main

main()
