"""What waits for backward and for the next step: the ledger's words, what is dropped, optimizer states."""
