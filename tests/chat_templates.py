"""Chat templates after published formats, tokenizers that have them, and conversations for them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from tests.text_data import write_bpe

CHATML = """\
{% for m in messages %}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The same text, which says itself what the model writes.
CHATML_MARKED = """\
{% for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- m.content ~ '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# A system message of its own, tools as lines of JSON, answers of tools in a turn of the user.
QWEN25 = """\
{%- set talk = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] %}
    {%- set talk = messages[1:] %}
{%- else %}
    {%- set first = 'You are a helpful assistant.' %}
{%- endif %}
{{- '<|im_start|>system\\n' + first }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for m in talk %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- set f = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
            {{- f.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Thinking is kept only behind the last question; the last turn always has some.
QWEN3 = """\
{%- set ns = namespace(question=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- set thought, said = m.reasoning_content or '', m.content %}
        {%- if not thought and '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.question and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- said }}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# BOS, headers, the date, tools in the first question, calls as JSON.
LLAMA31 = """\
{{- bos_token }}
{%- macro head(role) %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- endmacro %}
{%- set talk = messages[1:] if messages[0].role == 'system' else messages %}
{{- head('system') + 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in talk %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('This model can make one call at a time') }}
        {%- endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- head('assistant') + '{"name": "' + f.name + '", "parameters": ' }}
        {{- f.arguments | tojson + '}<|eot_id|>' }}
    {%- elif m.role in ('tool', 'ipython') %}
        {{- head('ipython') + m.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- head(m.role) }}
        {%- if tools is not none and loop.first %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}"""

# No prompt for the answer, EOS behind it, and rules about the order of roles.
MISTRAL = """\
{{ bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate: user, assistant, user, …') }}
{%- endif %}
{%- if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""

# EOS once, behind everything, unless an answer is asked for.
PHI3 = """\
{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# No system message, the assistant is called model, contents are stripped.
GEMMA = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

ZEPHYR = """\
{% for m in messages %}
{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

# Contents may be lists of texts, and a loop is left early.
PARTS = """\
{%- for m in messages %}
{%- if loop.index > 9 %}{% break %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "chatml marked": CHATML_MARKED,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama-3.1": LLAMA31,
    "mistral": MISTRAL,
    "phi-3": PHI3,
    "gemma": GEMMA,
    "zephyr": ZEPHYR,
    "parts": PARTS,
}

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<start_of_turn>", "<end_of_turn>"),
)
STRIPPING = ("<|end|>",)  # it swallows the blanks behind it, as Phi-3's do
BOS, EOS = "<s>", "</s>"


def write_chat_tokenizer(folder: Path, template: str | None = None, **config: object) -> Path:
    """A BPE with the special tokens of all templates; by itself it puts a BOS before a text."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_bpe(folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([BOS, EOS, *SPECIAL])
    tokenizer.add_special_tokens([AddedToken(t, rstrip=True, special=True) for t in STRIPPING])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.save(str(path))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    own = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | own | config))
    return folder


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def tool(content):
    return {"role": "tool", "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What it's like <there>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}

SHORT = [user("the cat sät"), assistant("on the mat. 42")]
TURNS = [*SHORT, user("  漢字?\n"), assistant("the mat.\n\n"), user("<b>&"), assistant("'cat'")]
WITH_SYSTEM = [system("Be kind."), *TURNS]
WITH_TOOLS = [
    user("the cat?"),
    assistant(None, tool_calls=[CALL]),
    tool("42 \u00e9"),
    assistant("on the mat"),
]
THINKING = [
    user("one"),
    assistant("two", reasoning_content="the cat"),
    user("three"),
    assistant("four", thinking="on\nthe mat"),
]
