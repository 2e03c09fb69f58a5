"""python -m llmq"""

from llmq.cli import main

main()
