"""The command line: a module for each command or group of commands, called from `cli.py`.

This folder may import every other folder. Begin to read with `cli.py`.
"""
