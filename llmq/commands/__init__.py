"""The command line: one module a command, over `cli.py`.

Imports everything.
Start with `cli.py`.
"""
