"""Strategies for chats, and a template in the manner of the K2 family before K2.5."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from engine.tokenizer import KIMI_SPECIAL_OFFSETS

# Tools as JSON, a default system message, slices, a loop that is left early, and the date.
FAMILY_TEMPLATE = """
{%- macro show(message) -%}
  {%- set c = message.get('content') -%}
  {%- if c is string -%}
    {{ c }}
  {%- elif c is not none -%}
    {% for part in c -%}
      {{ part['text'] }}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson() }}<|im_end|>
{%- endif -%}
{%- if messages[0]['role'] != 'system' -%}
  <|im_system|>system<|im_middle|>You are Kimi. It is {{ strftime_now('%Y') }}.<|im_end|>
{%- endif -%}
{%- set last = namespace(at=-1) -%}
{%- for i in range(messages|length-1, -1, -1) -%}
  {%- if messages[i]['role'] == 'assistant' and not messages[i].get('tool_calls') -%}
    {%- set last.at = i -%}
    {%- break -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages[:last.at+1] + messages[last.at+1:] -%}
  <|im_{{ message['role'] if message['role'] in ['user', 'assistant'] else 'system' }}|>
  {{- message.get('name') or message['role'] }}<|im_middle|>
  {%- if message['role'] == 'tool' -%}
    ## Return of {{ message.tool_call_id }}
{{ show(message) }}
  {%- else -%}
    {{ show(message) }}
  {%- endif -%}
  {%- if message.get('tool_calls') -%}
    <|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
      <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
      {%- if call['function']['arguments'] is string -%}
        {{ call['function']['arguments'] }}
      {%- else -%}
        {{ call['function']['arguments'] | tojson }}
      {%- endif -%}
      <|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""

HARMLESS = st.text(alphabet="ab 汉é\n\t\"'&<>{}%#|,.", max_size=12)
MARKERS = [*KIMI_SPECIAL_OFFSETS, "<|reserved_token_300|>", "<|im_", "end|>", "<", "|>", "EOS", "think"]
FORGED = st.lists(st.one_of(st.sampled_from(MARKERS), HARMLESS), max_size=4).map("".join)


def json_values(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), text)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
        max_leaves=6,
    )


def chats(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict]]:
    """Well-formed messages whose every free string comes from `text`."""
    parts = st.lists(st.builds(lambda t: {"type": "text", "text": t}, text), max_size=3)
    content = st.one_of(text, parts)
    plain = st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user"]), "content": content}, optional={"name": text}
    )
    arguments = st.one_of(text, st.dictionaries(text, json_values(text), max_size=2))
    function = st.fixed_dictionaries({"name": text, "arguments": arguments})
    call = st.fixed_dictionaries({"id": text, "type": st.just("function"), "function": function})
    assistant = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.one_of(st.none(), content)},
        optional={
            "name": text,
            "reasoning_content": st.one_of(st.none(), text),
            "tool_calls": st.lists(call, max_size=2),
        },
    )
    tool = st.fixed_dictionaries({"role": st.just("tool"), "content": content, "tool_call_id": text})
    return st.lists(st.one_of(plain, assistant, tool), min_size=1, max_size=5)


def tool_lists(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict]]:
    """Function tools: half of the schemas have a TypeScript form, the others are any JSON."""
    field = st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "array"])}, optional={"description": text, "default": text}
    )
    schema = st.builds(
        lambda fields: {"type": "object", "properties": fields}, st.dictionaries(text, field, max_size=2)
    )
    function = st.fixed_dictionaries(
        {"name": text.map(lambda t: t or "f")},
        optional={"description": text, "parameters": st.one_of(schema, st.dictionaries(text, json_values(text)))},
    )
    return st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": function}), max_size=2)
