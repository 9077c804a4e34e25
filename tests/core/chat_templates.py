"""Chat templates in the manner of the usual families, written for the tests."""

from __future__ import annotations

CHATML_TAGGED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with generation tags that leave out the end of the turn."""

_TURNS = """\
{%- set state = namespace(last=-1) -%}
{%- for message in messages if message.role == 'user' %}{% set state.last = loop.index0 %}{% endfor -%}
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endif -%}
{%- set turns = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set turns.user = turns.user + 1 %}{% endif -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{%- set content = message.content -%}
{%- set reasoning = message.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if turns.user == state.last -%}
{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' + (call.function.name | tojson) + (call.function.arguments | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
"""

THINKING = (
    _TURNS
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    + "{% endif %}{% endif %}"
)
"""As Qwen3 does it: reasoning only in the last turn, an empty think block in the prompt when it is off."""

THINKING_TAGGED = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
    "{{ '<|im_start|>assistant\\n' }}{% generation %}"
    "{%- if loop.last %}{{ '<think>\\n' + (message.reasoning_content or '') }}"
    "{{ '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{%- else -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{% endif %}"
)
"""The same for training: the tags hold the think block, also the empty one of a served prompt."""

THINKING_OPEN = (
    _TURNS
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    + "{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
"""As Qwen3.5 does it: the generation prompt already opens the think block."""

LLAMA3 = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"
)
"""As Llama 3 does it: headers between special tokens, trimmed contents, no line end between turns."""

LLAMA3_TOKENS = ("<|begin|>", "<|start|>", "<|end|>", "<|eot|>")

INSTRUCT = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
"""A template whose turns cannot be found: it appends nothing as a generation prompt."""
