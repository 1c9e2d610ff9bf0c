"""Short chat templates in the style of well-known families of models, for what is recognized in them."""

from __future__ import annotations

_TURNS = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

PLAIN = _TURNS
# The same, with a thought that the prompt opens.
OPENED = (
    _TURNS.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif") + "{#- </think> -#}"
)

# A switch, whose "off" is a closed thought; tools in XML marks around JSON; earlier thoughts are cut off.
QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nReturn {"name": <name>, "arguments": <object>} in <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '').split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# The prompt opens the thought, always.
R1 = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{ '<|Assistant|>' + message.content.split('</think>')[-1] }}"
    "{%- else %}{{ '<|User|>' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{%- endif %}"
)

# Another name of the switch, which is off unless it is set.
DEEPSEEK_HYBRID = (
    "{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}"
    "{%- for message in messages %}{{ message.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|Assistant|>' }}"
    "{%- if thinking %}{{ '<think>' }}{%- else %}{{ '</think>' }}{%- endif %}{%- endif %}"
)

# Messages in channels.
HARMONY = (
    "{%- set effort = reasoning_effort or 'medium' %}{{ '<|start|>system<|message|>Reasoning: ' + effort }}"
    "{{ '# Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- for message in messages %}"
    "{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}"
    "{%- endif %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"
)

SEED = (
    "{%- set budget = thinking_budget %}{%- for message in messages %}{{ message.content }}"
    "{{ '<seed:think>' }}{{ '</seed:think>' }}{%- endfor %}"
)

LLAMA = (
    "{%- if tools is not none %}{{ 'Environment: ipython\\n' }}"
    '{{ \'Respond with {"name": function name, "parameters": dictionary of arguments}.\' }}'
    "{%- for t in tools %}{{ t | tojson }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    "{%- elif message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>' + message.content }}"
    "{%- else %}{{ message.content }}{%- endif %}{%- endfor %}"
)

MISTRAL = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) }}{%- endif %}"
    "{{ '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{%- for call in message.tool_calls %}{{ call.function | tojson }}{%- endfor %}{{ ']' }}"
    "{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}"
    "{%- endif %}{%- endfor %}"
)

MAGISTRAL = MISTRAL + (
    "{{ '[THINK]' }}{{ '[/THINK]' }}"
    "{%- for tool in tools or [] %}{{ '[TOOL_CALLS]' + tool.function.name + '[ARGS]' }}{%- endfor %}"
)

# Tools in XML, which has no syntax of its own here.
QWEN_CODER = "{%- if tools %}{{ '<tool_call>\\n<function=name>\\n<parameter=x>\\n' }}{%- endif %}" + _TURNS
