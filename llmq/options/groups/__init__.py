"""Options in eight groups: a dataclass each, with the rules about its options in the same file.

The rooms below `run` receive the groups that they read; `TrainConfig` has all of them.
"""
