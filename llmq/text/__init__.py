"""From text to token files: conversations, chat templates, tokenizers, and tasks of `llmq eval`.

This room may import data (token files), base, report, runtime's cache folder, and from options the
folders of models. Start with `tokenize.py`; `inputs.py` defines the sources of text.
"""
