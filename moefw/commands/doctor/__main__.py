"""A child process: ``python -m moefw.commands.doctor PROBE ...`` runs probes and writes one JSON line for each."""

import sys

from moefw.commands.doctor.children import answer

answer(sys.argv[1:])
