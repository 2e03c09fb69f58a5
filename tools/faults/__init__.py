"""Machines that try faults on llmq: `python -m tools.faults --help`. Read machine.py first."""
