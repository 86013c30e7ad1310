"""What goes wrong in a run: a rank hangs, dies, leaves or is asked to stop, a number or a plugin is bad."""
