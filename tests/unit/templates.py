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

# An earlier version of the same family, which does not think.
QWEN_25 = QWEN.replace(".split('</think>')[-1].lstrip('\\n')", "").replace(
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
    "",
)

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
    "{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{%- endif %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    "{%- elif message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>' + message.content }}"
    "{%- else %}{{ message.content }}{%- endif %}{%- endfor %}"
)

MISTRAL = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) }}{%- endif %}"
    "{{ '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{%- for call in message.tool_calls %}"
    "{{ call.function | tojson }}{{ ', ' if not loop.last }}{%- endfor %}"
    "{{ ']' + eos_token }}"
    "{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}"
    "{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{%- endif %}{%- endfor %}"
)

MAGISTRAL = (
    MISTRAL.replace("[TOOL_CALLS][", "")
    .replace(
        "{{ call.function | tojson }}{{ ', ' if not loop.last }}",
        "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}",
    )
    .replace("']' + eos_token", "eos_token")
    + "{#- [THINK] [/THINK] -#}"
)

# Tools and calls in XML, an argument between tags.
QWEN_CODER = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}
{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
{{- '\\n<function>\\n<name>' + tool.name + '</name>\\n<description>' + tool.description + '</description>' }}
{{- '\\n<parameters>' }}
{%- for name, fields in tool.parameters.properties | items %}
{{- '\\n<parameter>\\n<name>' + name + '</name>\\n<type>' + fields.type | string + '</type>\\n</parameter>' }}
{%- endfor %}
{{- '\\n</parameters>\\n</function>' }}
{%- endfor %}
{{- '\\n</tools>\\n\\nTo call a function, reply in this format:\\n\\n<tool_call>\\n<function=example>\\n' }}
{{- '<parameter=one>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Thoughts that can be switched off; calls with a name, then keys and values between tags.
GLM = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
For each function call, output:
<tool_call>{function-name}
<arg_key>{arg-key}</arg_key>
<arg_value>{arg-value}</arg_value>
</tool_call>
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
<think></think>
{{ m.content.split('</think>')[-1] }}
{%- for tc in m.tool_calls or [] -%}
{{ '\\n<tool_call>' + tc.function.name }}
{% for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>
{%- else -%}<|system|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""

# Messages in channels, with tools and calls.
GPT_OSS = """\
{%- set effort = reasoning_effort or 'medium' -%}
{{- '<|start|>system<|message|>Reasoning: ' + effort }}
{{- '\\n\\n# Valid channels: analysis, commentary, final.' }}
{%- if tools %}{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif %}
{{- '<|end|>' }}
{%- if tools %}
{{- '<|start|>developer<|message|># Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
{%- for tool in tools %}
{{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {\\n' }}
{%- for name, spec in tool.function.parameters.properties | items %}
{{- name + ': ' + spec.type | string + ',\\n' }}
{%- endfor %}
{{- '}) => any;\\n\\n' }}
{%- endfor %}
{{- '} // namespace functions<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}{{- raise_exception('both content and thinking') }}{%- endif %}
{%- if message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}
{{- '<|call|>' }}
{%- set last.name = call.name %}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# The same family as QWEN_CODER, thinking: efforts by other names, and anything else is refused.
QWEN_38 = (
    QWEN_CODER.replace(
        "{%- for message in messages %}",
        """{%- set effort = reasoning_effort | default('xhigh') %}
{%- if enable_thinking is undefined or enable_thinking %}
{%- if effort not in ('xhigh', 'medium', 'low') %}{{- raise_exception('effort ' + effort) }}{%- endif %}
{{- '<|im_start|>system\\nReasoning effort is set to ' + effort + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}""",
        1,
    )
    + "{%- if add_generation_prompt %}{{- '<think>\\n' if enable_thinking is undefined or enable_thinking"
    " else '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)

# Thoughts in a channel, off unless they are switched on; calls in braces, with results in the same message.
GEMMA_4 = """\
{%- macro spelled(item) -%}
{%- if item is string -%}{{- '<|"|>' + item + '<|"|>' -}}
{%- elif item is boolean -%}{{- 'true' if item else 'false' -}}
{%- elif item is mapping -%}
{{- '{' -}}
{%- for key, value in item | dictsort -%}
{{- key }}:{{ spelled(value) }}{{ ',' if not loop.last -}}
{%- endfor -%}
{{- '}' -}}
{%- elif item is sequence -%}
{{- '[' -}}{%- for value in item -%}{{- spelled(value) }}{{ ',' if not loop.last -}}{%- endfor -%}{{- ']' -}}
{%- else -%}{{- item -}}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if enable_thinking or tools -%}
{{- '<|turn>system\\n' + ('<|think|>\\n' if enable_thinking else '') -}}
{%- for tool in tools or [] -%}
{{- '<|tool>declaration:' + tool.function.name + '{description:' + spelled(tool.function.description) -}}
{{- ',parameters:' + spelled(tool.function.parameters) + '}<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- set last = namespace(results=false) -%}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<|tool_call>call:' + call.function.name + spelled(call.function.arguments) + '<tool_call|>' -}}
{%- endfor -%}
{%- for result in message.tool_responses or [] -%}
{{- '<|tool_response>response:' + result.name + '{value:' + spelled(result.response) + '}<tool_response|>' -}}
{%- endfor -%}
{%- set last.results = message.tool_responses is defined -%}
{{- (message.content or '').split('<channel|>')[-1] -}}
{%- if not last.results -%}{{- '<turn|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '' if last.results else '<|turn>model\\n' -}}
{{- '' if enable_thinking else '<|channel>thought\\n<channel|>' -}}
{%- endif -%}"""


def _calling(section: str, call: str, joint: str = "", end: str = "") -> str:
    """A template with calls in a section: the text before it, of a call, between two, and behind the last.

    `call` is an expression in which `name`, `values`, `id` and `n` are the call's.
    """
    return (
        "{%- for message in messages %}"
        "{%- if message.role == 'user' %}{%- if tools %}{{ (tools | tojson) + '\\n' }}{%- endif %}"
        "{{ '<|user|>' + message.content + '<|end|>' }}"
        "{%- elif message.tool_calls %}{{ '<|assistant|>' + (message.content or '') }}"
        f"{{{{ {section!r} }}}}"
        "{%- for c in message.tool_calls %}"
        "{%- set name = c.function.name %}{%- set values = c.function.arguments %}"
        "{%- set id = c.id %}{%- set n = loop.index0 | string %}"
        f"{{{{ {call} }}}}"
        f"{{{{ {joint!r} if not loop.last }}}}"
        "{%- endfor %}"
        f"{{{{ {end!r} + '<|end|>' }}}}"
        "{%- elif message.role == 'tool' %}{{ '<|result|>' + message.content + '<|end|>' }}"
        "{%- else %}{{ '<|assistant|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
    )


def _tagged(opens: str, argument: str, closes: str, joint: str, section: str = "", end: str = "") -> str:
    """The same with arguments one by one; `argument` is an expression of `key` and `value`."""
    each = f"{{%- for key, value in values | items %}}{{{{ {argument} }}}}{{%- endfor %}}"
    written = f"{opens} }}}}{each}{{{{ {closes}"
    return _calling(section, written, joint, end)


_JSON = "(values | tojson)"
_TEXT = "(value if value is string else value | tojson)"
_PYTHON = "(value if value is string else value | string)"

# A list in which a call is an object with its name as the key.
APERTUS = _calling("<|tools|>[", f"'{{\"' + name + '\": ' + {_JSON} + '}}'", ", ", "]<|tools_end|>")
# A list with indices as ids before the name.
COMMAND_R = _calling(
    "<|START_ACTION|>[\n",
    f'\'    {{"call_id": "\' + n + \'", "tool_name": "\' + name + \'", "parameters": \' + {_JSON} + \'}}\'',
    ",\n",
    "\n]<|END_ACTION|>",
)
# Objects in lines, within one pair of marks.
MINIMAX_1 = _calling(
    "<tool_calls>\n",
    f"'{{\"name\": \"' + name + '\", \"arguments\": ' + {_JSON} + '}}\\n'",
    "",
    "</tool_calls>",
)
# A list with ids behind the arguments.
NEMO = _calling(
    "[TOOL_CALLS][",
    f'\'{{"name": "\' + name + \'", "arguments": \' + {_JSON} + \', "id": "\' + id + \'"}}\'',
    ", ",
    "]",
)
# Names, ids and arguments between marks.
MISTRAL_IDS = _calling("", f"'[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + {_JSON}")
KIMI = _calling(
    "<|calls_begin|>",
    f"'<|call_begin|>functions.' + name + ':' + n + '<|argument_begin|>' + {_JSON} + '<|call_end|>'",
    "",
    "<|calls_end|>",
)
SOLAR = _calling(
    "<|tool_calls|>",
    f"'<|call:begin|>' + id + '<|call:name|>' + name + '<|call:args|>' + {_JSON} + '<|call:end|>'",
)
# A code fence for the arguments, and marks of letters other than ASCII.
DEEPSEEK = _calling(
    "<｜calls▁begin｜>",
    f"'<｜call▁begin｜>function<｜sep｜>' + name + '\\n```json\\n' + {_JSON} + '\\n```<｜call▁end｜>'",
    "\n",
    "<｜calls▁end｜>",
)
FUNCTIONARY = _calling("", f"'<function=' + name + '>' + {_JSON} + '</function>'")
# Words, and no mark at all.
ACTIONS = _calling(
    "\nAction:\n```json\n[\n",
    f"'{{\"tool_name\": \"' + name + '\", \"parameters\": ' + {_JSON} + '}}'",
    ",\n",
    "\n]```",
)
# Several calls within a section, with attributes for names.
MINIMAX_2 = _tagged(
    "'<invoke name=\"' + name + '\">\\n'",
    f"'<parameter name=\"' + key + '\">' + {_TEXT} + '</parameter>\\n'",
    "'</invoke>\\n'",
    "",
    "<mm:call>\n",
    "</mm:call>",
)
# Lists and objects as tags within tags, each behind a mark; nulls are left out.
MINIMAX_3 = (
    "{%- macro spelled(item) -%}"
    "{%- if item is mapping -%}"
    "{%- for key, value in item.items() if value is not none -%}"
    "]<]mark[>[<{{ key }}>{{ spelled(value) }}]<]mark[>[</{{ key }}>"
    "{%- endfor -%}"
    "{%- elif item is iterable and item is not string -%}"
    "{%- for value in item -%}]<]mark[>[<item>{{ spelled(value) }}]<]mark[>[</item>{%- endfor -%}"
    "{%- else -%}{{ (item | tojson) if item is boolean else item }}{%- endif -%}"
    "{%- endmacro -%}"
) + _calling(
    "]<]mark[>[<tool_call>\n",
    "']<]mark[>[<invoke name=\"' + name + '\">' + spelled(values) + ']<]mark[>[</invoke>\n'",
    "",
    "]<]mark[>[</tool_call>",
)
# The type of a value in its tag.
DSML = _tagged(
    "'<｜DSML｜invoke name=\"' + name + '\">\\n'",
    "'<｜DSML｜parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + "
    f"'\">' + {_TEXT} + '</｜DSML｜parameter>\\n'",
    "'</｜DSML｜invoke>\\n'",
    "",
    "<｜DSML｜calls>\n",
    "</｜DSML｜calls>",
)
# Values other than texts as Python writes them.
SEED_CALLS = _tagged(
    "'<seed:call>\\n<function=' + name + '>\\n'",
    f"'<parameter=' + key + '>' + {_PYTHON} + '</parameter>\\n'",
    "'</function>\\n</seed:call>'",
    "\n",
)
# A tag named after the argument.
NAMED_TAGS = _tagged(
    "'<do name=\"' + name + '\">'",
    f"'<' + key + '>' + {_TEXT} + '</' + key + '>'",
    "'</do>'",
    "",
    "<calls>",
    "</calls>",
)
# Expressions of Python.
PYTHONIC = _tagged(
    "name + '('",
    "key + '=' + ((value | tojson) if value is string else value | string) + (')' if loop.last else ', ')",
    "('' if values else ')')",
    ", ",
    "<|call_start|>[",
    "]<|call_end|>",
)
# Lists tools, and leaves calls to the text.
LFM2 = (
    "{%- if tools %}{{ 'List of tools: ' + (tools | tojson) }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Tags around thoughts, texts and calls alike.
TEXT_TAGS = """\
{%- macro tag(words) -%}{{- '<|open|>' + words + '<|sep|>' -}}{%- endmacro -%}
{%- macro end(word) -%}{{- '<|close|>' + word + '<|sep|>' -}}{%- endmacro -%}
{%- if thinking is undefined -%}{%- set thinking = true -%}{%- endif -%}
{%- if tools -%}
{{- tag('message role="system"') + (tools | tojson) + end('message') + '<|end_of_msg|>' -}}
{%- endif -%}
{%- for m in messages -%}
{{- tag('message role="' + m.role + '"') -}}
{%- if m.role != 'assistant' -%}{{- m.content -}}
{%- else -%}
{%- if thinking -%}{{- tag('think') + (m.reasoning_content or '') + end('think') -}}{%- endif -%}
{{- tag('response') + (m.content or '') + end('response') -}}
{%- if m.tool_calls -%}
{{- tag('tools') -}}
{%- for c in m.tool_calls -%}
{{- tag('call tool="' + c.function.name + '" index="' + (loop.index | string) + '"') -}}
{%- for key, value in c.function.arguments | items -%}
{%- set kind = 'object' if value is mapping else 'null' if value is none else 'array' -%}
{%- set kind = 'boolean' if value is boolean else 'number' if value is number else kind -%}
{%- set kind = 'string' if value is string else kind -%}
{{- tag('argument key="' + key + '" type="' + kind + '"') -}}
{{- (value if value is string else value | tojson) + end('argument') -}}
{%- endfor -%}
{{- end('call') -}}
{%- endfor -%}
{{- end('tools') -}}
{%- endif -%}
{%- endif -%}
{{- end('message') + '<|end_of_msg|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- tag('message role="assistant"') + tag('think' if thinking else 'response') -}}
{%- endif -%}"""
