"""Files, folders and processes of this machine, handled so that nothing of others is read, lost or mixed in."""
