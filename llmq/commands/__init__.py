"""The command line: a module for each command or group of commands, called from `cli.py`.

This package may import every other package. Begin to read with `cli.py`.
"""
