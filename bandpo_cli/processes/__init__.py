"""Processes of a command: ranks and what they exchange; child processes, waits that take too long, stacks."""
