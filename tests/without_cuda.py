"""The command line as a script for a process in which no CUDA library can be imported."""

WITHOUT_CUDA = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"cupy", "cupy_backends", "cuda", "nvmath", "cudnn", "pynvml"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
from llmq.commands.cli import main
main()
"""
