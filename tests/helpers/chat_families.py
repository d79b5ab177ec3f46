# ruff: noqa: E501, RUF001 -- templates have long lines; DeepSeek writes its marks with fullwidth characters
"""Small tokenizers with chat templates in the structure of public model families."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from services.common.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tokenizer's tokens and a chat template."""

    template: str
    special: tuple[str, ...]
    """Tokens that are flagged special."""
    plain: tuple[str, ...] = ()
    """Added tokens that are not flagged special."""
    eos: str
    stops: tuple[str, ...] = ()
    """Further tokens in the generation configuration."""
    bos: str | None = None
    roles: tuple[str, ...] = ("system", "user", "assistant", "tool")
    """Roles that the template renders, with any other role if it has ``other``."""
    inner: tuple[str, ...] = ()
    """Marks inside a turn, which do not open or close one."""
    has_calls: bool = True
    """True if the template renders the calls of an assistant's message."""


_HERMES = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nreturn <tool_call>\\n{...}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}DEFAULT{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' and not loop.first or message.role not in \
('system', 'user', 'assistant', 'tool') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
REPLY
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_QWEN25 = _HERMES.replace(
    "REPLY", "{{- '<|im_start|>assistant\\n' + (message.content or '') }}"
).replace("DEFAULT", "{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}")
_QWEN3 = """\
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}
{%- if ns.open and message.role == 'user' and not (message.content.startswith('<tool_response>') \
and message.content.endswith('</tool_response>')) %}
{%- set ns.open = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}
{%- endif %}{%- endfor %}""" + _HERMES.replace("DEFAULT", "").replace(
    "REPLY",
    """\
{%- set content = message.content or '' %}{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}""",
)
_LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today Date: ' + (strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024') + '\\n\\n' }}
{{- system_message }}
{%- if tools %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + \
'<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
_MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system_message = messages[0].content %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in loop_messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == users[-1] %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- if loop.last and system_message is defined %}
{{- '[INST] ' + system_message + '\\n\\n' + message.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' }}{%- endfor %}{{- eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + \
'"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}
{%- endfor %}"""
_GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- if messages[0]['content'] is string -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}
{%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- else -%}{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
_GLM4 = """\
[gMASK]<sop>
{%- if tools -%}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' }}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- if m.reasoning_content is string and loop.last %}{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}
{%- endif -%}
{%- if (m.content or '').strip() -%}{{ '\\n' + m.content.strip() }}{%- endif -%}
{%- for tc in m.tool_calls or [] -%}{{ '\\n<tool_call>' + tc.function.name }}
{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
_PHI4 = """\
{% for message in messages %}{% if (message['role'] == 'system') %}\
{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}\
{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}\
{% elif (message['role'] == 'assistant') %}\
{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
_DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}\
{%- endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] %}{%- set ns.is_tool = false -%}\
{%- for tool in message['tool_calls'] %}{%- if loop.first %}\
{{'<｜Assistant｜><｜tool▁calls▁begin｜>'}}{%- else %}{{'\\n'}}{%- endif %}\
{{'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' + \
(tool['function']['arguments'] | tojson) + '\\n```<｜tool▁call▁end｜>'}}{%- endfor %}\
{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}\
{%- if message['role'] == 'assistant' and not message['tool_calls'] %}\
{%- if ns.is_tool %}{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}\
{%- set ns.is_tool = false -%}\
{%- else %}{% set content = message['content'] %}{% if '</think>' in content %}\
{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- if not ns.is_tool %}{{'<｜tool▁outputs▁begin｜>'}}{%- endif %}\
{%- set ns.is_tool = true -%}\
{{'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}{%- endfor -%}\
{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}\
{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""
_GPT_OSS = """\
{{- '<|start|>system<|message|>You are ChatGPT.\\nCurrent date: ' + \
(strftime_now('%Y-%m-%d') if strftime_now is defined else '') + '<|end|>' }}
{%- set ns = namespace(name=none, loop_messages=messages) %}
{%- if messages[0].role in ('system', 'developer') %}
{%- set ns.loop_messages = messages[1:] %}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content }}
{%- if tools %}{{- '\\n\\n# Tools\\n\\n' + (tools | tojson) }}{%- endif %}{{- '<|end|>' }}
{%- elif tools %}{{- '<|start|>developer<|message|># Tools\\n\\n' + (tools | tojson) + '<|end|>' }}
{%- endif %}
{%- for message in ns.loop_messages %}
{%- if message.role == 'assistant' %}
{%- if '<|channel|>analysis<|message|>' in (message.content or '') %}
{{- raise_exception('You have passed a message containing <|channel|> tags in the content field.') }}
{%- endif %}
{%- if message.tool_calls %}
{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}{%- set ns.name = call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- set ns.name = none %}{%- endif %}
{%- elif message.role == 'tool' %}
{%- if ns.name is none %}{{- raise_exception('tool message without a call') }}{%- endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}{{- '<|end|>' }}
{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
_SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
_CHATGLM3 = """\
{% for message in messages %}{% if loop.first %}[gMASK]sop{% endif %}\
{{ '<|' + message['role'] + '|>\\n ' + message['content'] }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n ' }}{% endif %}"""
_OLMO2 = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + eos_token }}\
{% if not loop.last %}{{ '\\n' }}{% endif %}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
_NEMOTRON = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ '<SPECIAL_10>System\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'user' %}{{ '<SPECIAL_11>User\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'assistant' %}{{ '<SPECIAL_11>Assistant\\n' + message['content'] + '\\n' }}\
{% if loop.last %}{{ '<SPECIAL_12>' }}{% endif %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\\n' }}{% endif %}"""
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>")
_QWEN_INNER = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

_KIMI_CALLS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_KIMI = """\
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}\
{%- for m in messages %}\
{%- if m.role == 'user' %}{{- '<|im_user|>user<|im_middle|>' }}\
{%- elif m.role == 'assistant' %}{{- '<|im_assistant|>assistant<|im_middle|>' }}\
{%- elif m.role == 'tool' %}{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' }}\
{%- else %}{{- '<|im_system|>' + m.role + '<|im_middle|>' }}{% endif %}\
{%- if m.content is string %}{{- m.content }}\
{%- else %}{% for part in m.content or [] %}{{- part.text }}{% endfor %}{% endif %}\
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}\
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}\
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}\
{{- '<|tool_call_end|>' }}{% endfor %}{{- '<|tool_calls_section_end|>' }}{% endif %}\
{{- '<|im_end|>' }}{% endfor %}\
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

FAMILIES = {
    "kimi_k2": Family(
        template=_KIMI,
        special=(
            *("[BOS]", "[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
            *("<|im_middle|>", "<|im_end|>"),
        ),
        plain=_KIMI_CALLS,
        inner=_KIMI_CALLS,
        eos="<|im_end|>",
        stops=("[EOS]",),
        roles=("system", "user", "assistant", "tool", "other"),
    ),
    "qwen2.5": Family(
        template=_QWEN25,
        special=_QWEN_TOKENS,
        plain=_QWEN_INNER[:4],
        inner=_QWEN_INNER[:4],
        eos="<|im_end|>",
        stops=("<|endoftext|>",),
        roles=("system", "user", "assistant", "tool", "other"),
    ),
    "qwen3": Family(
        template=_QWEN3,
        special=_QWEN_TOKENS,
        plain=_QWEN_INNER,
        inner=_QWEN_INNER,
        eos="<|im_end|>",
        stops=("<|endoftext|>",),
        roles=("system", "user", "assistant", "tool", "other"),
    ),
    "llama3": Family(
        template=_LLAMA3,
        special=(
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
        ),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        stops=("<|end_of_text|>", "<|eom_id|>"),
        roles=("system", "user", "assistant", "tool", "other"),
    ),
    "mistral": Family(
        template=_MISTRAL,
        special=(
            "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        ),
        eos="</s>",
        bos="<s>",
    ),
    "gemma3": Family(
        template=_GEMMA3,
        special=("<bos>", "<eos>"),
        # In some releases the marks of turns are not flagged.
        plain=("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "\n\n", "<h1>", "</h1>"),
        inner=("\n\n", "<h1>", "</h1>"),
        eos="<eos>",
        bos="<bos>",
        stops=("<end_of_turn>",),
        roles=("system", "user", "assistant"),
        has_calls=False,
    ),
    "glm4": Family(
        template=_GLM4,
        special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        plain=(*_QWEN_INNER, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        inner=(*_QWEN_INNER, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
    ),
    "phi4": Family(
        template=_PHI4,
        special=("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        eos="<|im_end|>",
        roles=("system", "user", "assistant"),
        has_calls=False,
    ),
    "deepseek": Family(
        template=_DEEPSEEK,
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        plain=(
            "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
            "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
        inner=("<think>", "</think>"),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "gpt_oss": Family(
        template=_GPT_OSS,
        special=(
            "<|startoftext|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
            "<|return|>", "<|call|>",
        ),
        eos="<|return|>",
        stops=("<|call|>",),
    ),
    "smollm2": Family(
        template=_SMOLLM2,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        roles=("system", "user", "assistant", "other"),
        has_calls=False,
    ),
    "phi3": Family(
        template=_PHI3,
        special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|endoftext|>",
        stops=("<|end|>", "<|assistant|>"),
        roles=("system", "user", "assistant"),
        has_calls=False,
    ),
    "chatglm3": Family(
        template=_CHATGLM3,
        special=("</s>", "[gMASK]", "sop"),
        # Its template writes the last of them for messages of that role only.
        plain=("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        eos="</s>",
        stops=("<|user|>", "<|observation|>"),
        roles=("system", "user", "assistant"),
        has_calls=False,
    ),
    "olmo2": Family(
        template=_OLMO2,
        special=("<|endoftext|>", "<|pad|>"),
        eos="<|endoftext|>",
        bos="<|endoftext|>",
        roles=("system", "user", "assistant"),
        has_calls=False,
    ),
    "nemotron": Family(
        template=_NEMOTRON,
        special=("<s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        eos="<SPECIAL_12>",
        bos="<s>",
        stops=("<SPECIAL_11>",),
        roles=("system", "user", "assistant"),
        has_calls=False,
    ),
}  # fmt: skip
"""Families by name."""


def byte_backend(special: Sequence[str], plain: Sequence[str] = ()) -> Backend:
    """Returns a byte-level tokenizer without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({symbol: n for n, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return backend


def spaced_backend(special: Sequence[str], plain: Sequence[str] = (), *, scheme: str) -> Backend:
    """Returns a tokenizer that marks the start of a text with a space, as SentencePiece's do.

    Args:
        scheme: ``first`` or ``always`` (Metaspace), or ``normalizer`` (as Llama 2's).
    """
    characters = ["▁", *map(chr, range(33, 127)), "\n"]
    tokens = ["<unk>", *characters, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", character) for character in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {token: n for n, token in enumerate([*tokens, *map("".join, merges)])}
    backend = Backend(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return backend


def family_tokenizer(
    name: str,
    backend: Backend | None = None,
    *,
    eos: str | None = None,
    stops: Sequence[str] | None = None,
    template: str | None = None,
    begins_texts: bool = False,
    **options: Any,
) -> Tokenizer:
    """Returns the tokenizer of a family.

    Args:
        backend: A tokenizer with the family's added tokens; by default one of bytes.
        eos: Another end token, for example that of the family's base model.
        stops: Other tokens in the generation configuration.
        template: Another chat template.
        begins_texts: True to add the beginning-of-sequence token to each text.
    """
    family = FAMILIES[name]
    if backend is None:
        backend = byte_backend(family.special, family.plain)
    if begins_texts:
        assert family.bos is not None
        first = (family.bos, backend.token_to_id(family.bos))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[first]
        )
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos or family.eos,
        bos_token=family.bos,
        pad_token=family.special[0],
        clean_up_tokenization_spaces=False,
        chat_template=template or family.template,
    )
    stop_texts = family.stops if stops is None else stops
    stop_ids = [inner.convert_tokens_to_ids(token) for token in stop_texts]
    return Tokenizer(inner, name=name, stop_ids=stop_ids, **options)
