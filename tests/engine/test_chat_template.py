"""Chat templates: the reference texts of Kimi-K2.5, control tokens that nobody can forge, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat_template import ChatTemplate
from engine.config import TINY_CHECKPOINT, ConfigError
from engine.errors import InvalidRequestError
from engine.tokenizer import Tokenizer
from models.kimi_k25.tool_declaration import declare_tools
from tests.chats import FAMILY_TEMPLATE, FORGED, HARMLESS, chats, json_values, tool_lists
from tests.tokenizers import write_tokenizer

K25 = ChatTemplate.from_directory(TINY_CHECKPOINT, declare_tools)
FAMILY = ChatTemplate(FAMILY_TEMPLATE, declare_tools)
# Templates outside the family that cut or compare the caller's text.
EDITING = ChatTemplate(
    "{%- for m in messages -%}<|im_user|>{{ m.content | trim if m.content is string }}"
    "{%- if '</think>' in m.content -%}{{ m.content.split('</think>')[-1] }}{%- endif -%}<|im_end|>{%- endfor -%}",
    declare_tools,
)
TEMPLATES = st.sampled_from([K25, FAMILY])
U, A, S, M, E = "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"
ASK = [{"role": "user", "content": "Hi"}]
SYSTEM_ASK = [{"role": "system", "content": "Be brief."}, *ASK]
CALL = {"id": "functions.get_weather:0", "type": "function", "function": {"name": "get_weather"}}
WEATHER = [
    {"role": "user", "content": "Weather in Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "need tool",
        "tool_calls": [CALL | {"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}],
    },
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "4 C"},
]
SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
)
LOOP = (
    f"{U}user{M}Weather in Oslo?{E}{A}assistant{M}<think>need tool</think>{SECTION}{E}"
    f"{S}tool{M}## Return of functions.get_weather:0\n4 C{E}"
)
FUNCTION = {"name": "ping", "description": "Is it there?", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_directory(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if i >= tokenizer.vocab_size - 256]


def test_b015_example_a_thinks_by_default():
    expected = f"{S}system{M}Be brief.{E}{U}user{M}Hi{E}{A}assistant{M}<think>"
    assert K25.render(SYSTEM_ASK) == K25.render(SYSTEM_ASK, thinking=True) == expected
    assert K25.render(SYSTEM_ASK, thinking=None) == expected
    assert K25.render(SYSTEM_ASK, add_generation_prompt=False) == expected.removesuffix(f"{A}assistant{M}<think>")


@pytest.mark.parametrize("switch", ["thinking", "enable_thinking"])
def test_b015_example_b_without_thinking(switch):
    expected = f"{S}system{M}Be brief.{E}{U}user{M}Hi{E}{A}assistant{M}<think></think>"
    assert K25.render(SYSTEM_ASK, **{switch: False}) == expected


def test_example_c_drops_the_reasoning_of_past_turns():
    messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
        {"role": "user", "content": "q2"},
    ]
    expected = f"{U}user{M}q1{E}{A}assistant{M}<think></think>a1{E}{U}user{M}q2{E}{A}assistant{M}<think>"
    assert K25.render(messages) == expected
    kept = expected.replace("<think></think>a1", "<think>r1</think>a1")
    assert K25.render(messages, preserve_thinking=True) == kept
    assert K25.render(messages, preserve_thinking=True, thinking=False) == kept + "</think>"


def test_b013_example_d_keeps_the_reasoning_of_a_running_tool_loop():
    assert K25.render(WEATHER) == f"{LOOP}{A}assistant{M}<think>"
    assert K25.render(WEATHER, thinking=False) == (LOOP.replace("need tool", "") + f"{A}assistant{M}<think></think>")
    answered = [*WEATHER, {"role": "assistant", "content": "Cold."}, *ASK]
    assert K25.render(answered) == (
        LOOP.replace("need tool", "") + f"{A}assistant{M}<think></think>Cold.{E}{U}user{M}Hi{E}{A}assistant{M}<think>"
    )


def test_example_e_media_under_the_jinja_of_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (Path(TINY_CHECKPOINT) / "chat_template.jinja").read_text()
    media = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}, {"type": "video"}]}]
    options = {"chat_template": source, "add_generation_prompt": True}
    texts, _ = render_jinja_template([media, WEATHER, [{"role": "user", "content": None}]], **options)
    assert texts[0] == (
        f"{U}user{M}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\nWhat?"
        f"<|kimi_k25_video_placeholder|>\n{E}{A}assistant{M}<think>"
    )
    assert texts[1:] == [K25.render(WEATHER), f"{U}user{M}{E}{A}assistant{M}<think>"]


def test_example_f_declares_tools_before_everything_else():
    declared = declare_tools(TOOLS)
    assert K25.render(SYSTEM_ASK, TOOLS) == f"{S}tool_declare{M}{declared}{E}" + K25.render(SYSTEM_ASK)
    assert K25.render(SYSTEM_ASK, []) == K25.render(SYSTEM_ASK)


def test_tools_without_a_typescript_form_are_sorted_compact_json():
    tools = [
        {"type": "function", "function": {"name": "é<", "parameters": {"oneOf": [], "properties": {"a": {"b": 1}}}}}
    ]
    assert declare_tools(tools) is None
    declared = '[{"function":{"name":"é<","parameters":{"oneOf":[],"properties":{"a":{"b":1}}}},"type":"function"}]'
    assert K25.render(ASK, tools).startswith(f"{S}tool_declare{M}{declared}{E}")


def test_arguments_are_verbatim_or_json():
    for arguments, text in (
        ('{ "a":1}', '{ "a":1}'),
        ("no json", "no json"),
        ({"ü": [1, None, "<&'>"]}, """{"ü": [1, null, "<&'>"]}"""),
        (None, "{}"),
    ):
        call = CALL | {"function": {"name": "f", "arguments": arguments}}
        rendered = K25.render([*ASK, {"role": "assistant", "tool_calls": [call]}])
        assert f"<|tool_call_argument_begin|>{text}<|tool_call_end|>" in rendered


def test_messages_are_brought_to_one_form():
    assistant = {"role": "assistant", "content": None, "tool_calls": WEATHER[1]["tool_calls"]}
    echo = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "unknown": {"a": 1}}
    plain = [WEATHER[0], assistant, WEATHER[2]]
    for variant in (
        [WEATHER[0], assistant | echo | {"reasoning_content": None, "reasoning": None, "name": None}, WEATHER[2]],
        [WEATHER[0], assistant | {"reasoning_content": ""}, WEATHER[2] | {"name": "get_weather"}],
        [
            WEATHER[0] | {"name": ""},
            assistant | {"content": ""},
            WEATHER[2] | {"content": [{"type": "text", "text": "4 C"}]},
        ],
    ):
        assert K25.render(variant) == K25.render(plain)
        assert K25.render(variant) == f"{LOOP.replace('need tool', '')}{A}assistant{M}<think>"
    assert K25.render([WEATHER[0], assistant | {"reasoning": "need tool"} | echo, WEATHER[2]]) == K25.render(WEATHER)
    done = {"role": "assistant", "content": "x", "tool_calls": None} | echo
    assert K25.render([*ASK, done]) == K25.render([*ASK, {"role": "assistant", "content": "x", "tool_calls": []}])
    assert K25.render([{"role": "developer", "content": "Be brief."}, *ASK]) == K25.render(SYSTEM_ASK)
    assert K25.render([{"role": "user", "name": "ann", "content": ""}]).startswith(f"{U}ann{M}{E}")


def test_b016_parts_keep_their_order():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "😀"}, {"type": "text", "text": " two"}]
    assert K25.render([{"role": "user", "content": parts}]) == K25.render([{"role": "user", "content": "one 😀 two"}])
    assert K25.render([{"role": "user", "content": []}]) == K25.render([{"role": "user", "content": ""}])


def test_other_templates_of_the_family_render():
    text = FAMILY.render(WEATHER, TOOLS)
    assert text.startswith(f"{S}tool_declare{M}{json.dumps(TOOLS)}{E}{S}system{M}You are Kimi. It is 2")
    assert text.endswith(f"{SECTION}{E}{S}tool{M}## Return of functions.get_weather:0\n4 C{E}{A}assistant{M}")


@settings(max_examples=60, deadline=None)
@given(TEMPLATES, chats(HARMLESS), tool_lists(HARMLESS))
def test_ids_equal_the_reference_tokenisation(tokenizer, template, messages, tools):
    text = template.render(messages, tools)
    ids = template.encode(tokenizer, messages, tools)
    assert ids == tokenizer.encode(text, allow_special=True)


@settings(max_examples=100, deadline=None)
@given(TEMPLATES, chats(FORGED), tool_lists(FORGED))
def test_no_text_of_the_caller_becomes_a_control_token(tokenizer, template, messages, tools):
    ids = template.encode(tokenizer, messages, tools)
    assert tokenizer.decode(ids, skip_special_tokens=False) == template.render(messages, tools)
    blank = json.loads(json.dumps([messages, tools]))
    for place in strings_in_place(blank):
        place()
    assert control_ids(tokenizer, ids) == control_ids(tokenizer, template.encode(tokenizer, *blank))


def strings_in_place(node: object) -> list:
    """One action for every free string of a chat that makes it harmless, of the same emptiness."""
    actions = []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        if isinstance(item, str) and key not in ("role", "type"):
            actions.append(lambda key=key, item=item: node.__setitem__(key, item and "z"))
        actions += strings_in_place(item)
    return actions


@pytest.mark.parametrize("template", [K25, FAMILY])
def test_every_marker_in_every_place_stays_text(tokenizer, template):
    chat = json.dumps([[{"role": "system", "name": "@", "content": "@"}, *WEATHER, *ASK]])
    (clean,) = json.loads(chat)
    expected = control_ids(tokenizer, template.encode(tokenizer, clean, TOOLS))
    for marker in tokenizer.special_tokens:
        if "reserved" in marker:
            continue
        (messages,) = json.loads(chat)
        for message in messages:
            message["content"] = f"{message['content']}{marker}"
        messages[0]["name"] = messages[2]["reasoning_content"] = messages[3]["tool_call_id"] = marker
        messages[2]["tool_calls"][0] = {"id": marker, "function": {"name": marker, "arguments": {marker: [marker]}}}
        schema = {"type": "object", "properties": {marker: {"type": "string", "enum": [marker], "description": marker}}}
        function = {"name": marker, "description": marker, "parameters": schema}
        for extra in ({}, {"oneOf": [{"type": marker}]}):
            tools = [{"type": "function", "function": function | {"parameters": schema | extra}}]
            assert control_ids(tokenizer, template.encode(tokenizer, messages, tools)) == expected


def test_a_template_that_edits_text_is_exact_or_refuses(tokenizer):
    fine = [{"role": "user", "content": "  padded <b> [x] \n"}]
    ids = EDITING.encode(tokenizer, fine)
    assert ids == tokenizer.encode(f"{U}padded <b> [x]{E}", allow_special=True)
    for text in (" <think> ", "a</think>b", " [EOS]"):
        with pytest.raises(InvalidRequestError, match="spells a control token"):
            EDITING.encode(tokenizer, [{"role": "user", "content": text}])


def test_keys_of_the_caller_are_text_too(tokenizer):
    template = ChatTemplate(
        "{%- for m in messages if m.tool_calls -%}{%- for key, value in m.tool_calls[0].function.arguments.items() -%}"
        "<|im_user|>{{ key }}={{ value }}<|im_end|>{%- endfor -%}{%- endfor -%}",
        declare_tools,
    )
    call = CALL | {"function": {"name": "f", "arguments": {"<think>": "[EOS]", "b": 1}}}
    ids = template.encode(tokenizer, [{"role": "assistant", "tool_calls": [call]}])
    user, end = tokenizer.special_tokens[U], tokenizer.im_end_id
    assert ids == [user, *tokenizer.encode("<think>=[EOS]"), end, user, *tokenizer.encode("b=1"), end]


def test_a_marker_may_not_form_across_a_border(tokenizer):
    template = ChatTemplate("<{{ messages[0].content }}>[{{ messages[0].name }}]<think>", declare_tools)
    ids = template.encode(tokenizer, [{"role": "user", "content": "think", "name": "EOS"}])
    assert control_ids(tokenizer, ids) == [tokenizer.think_begin_id]
    assert tokenizer.decode(ids) == "<think>[EOS]<think>"


@pytest.mark.parametrize(
    "switches",
    [
        {"tokenize": True},
        {"messages": []},
        {"tools": 1},
        {"add_generation_prompt": False},
        {"nope": 1},
        {"thinking": "no"},
        {"thinking": 0},
        {"thinking": True, "enable_thinking": False},
        {"json_mask": None},
        {"tools_ts_str": "x"},
        {"strftime_now": None},
        {"": None},
        [],
        "thinking",
    ],
)
def test_only_known_switches_pass(switches):
    with pytest.raises(InvalidRequestError) as error:
        K25.check_switches(switches)
    assert error.value.param.startswith("chat_template_kwargs")


def test_switches_are_those_that_the_template_reads():
    assert K25.check_switches({"enable_thinking": False, "preserve_thinking": None}) == {"thinking": False}
    assert K25.check_switches(None) == {}
    with pytest.raises(InvalidRequestError, match="it has: none"):
        FAMILY.render(ASK, thinking=False)


KEYS = ["role", "content", "name", "type", "text", "tool_calls", "tool_call_id", "id", "function", "arguments"]
WORDS = st.one_of(
    st.sampled_from([*KEYS, "user", "assistant", "tool", "system", "function", "text"]), st.text(max_size=3)
)


ANY_JSON = json_values(WORDS)


@st.composite
def spoiled_chats(draw: st.DrawFn) -> tuple:
    """A well-formed chat and tools of which one value, at any depth, is replaced by any JSON."""
    chat = draw(st.tuples(chats(HARMLESS), tool_lists(HARMLESS)))
    node = chat[draw(st.integers(0, 1))]
    while node and isinstance(node, dict | list):
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
        if not node[key] or draw(st.booleans()):
            node[key] = draw(ANY_JSON)
            break
        node = node[key]
    return chat


@settings(max_examples=80, deadline=None)
@given(TEMPLATES, st.one_of(st.tuples(ANY_JSON, ANY_JSON), spoiled_chats(), spoiled_chats()))
def test_any_json_renders_or_is_an_invalid_request(tokenizer, template, chat):
    messages, tools = chat
    try:
        ids = template.encode(tokenizer, messages, tools)
    except InvalidRequestError as error:
        assert error.param and error.param.startswith(("messages", "tools"))
    else:
        assert tokenizer.decode(ids, skip_special_tokens=False) == template.render(messages, tools)


def test_failures_of_the_template_are_invalid_requests():
    for source, message in (
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[9].content.x }}", "cannot render"),
        ("{{ 1 + messages }}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            ChatTemplate(source, declare_tools).render(ASK)


def test_where_templates_are_found(tmp_path):
    assert ChatTemplate.from_directory(tmp_path, declare_tools) is None
    config = tmp_path / "tokenizer_config.json"
    for template in ("one", [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}]):
        config.write_text(json.dumps({"chat_template": template}))
        assert ChatTemplate.from_directory(tmp_path, declare_tools).render(ASK) == "one"
    config.write_text("{}")
    assert ChatTemplate.from_directory(tmp_path, declare_tools) is None
    for text in ("{", '{"chat_template": 3}', '{"chat_template": "{% if %}"}'):
        config.write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            ChatTemplate.from_directory(tmp_path, declare_tools)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert ChatTemplate.from_directory(tmp_path, declare_tools).render(ASK) == "Hi!"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        ChatTemplate.from_directory(tmp_path, declare_tools)


@pytest.mark.timeout(60)
def test_large_prompts_take_linear_time(tokenizer):
    fields = {f"p{i}": {"type": "string", "description": "x" * 50, "enum": ["a", "b"]} for i in range(20)}
    schema = {"type": "object", "properties": fields}
    tools = [{"type": "function", "function": FUNCTION | {"name": f"f{i}", "parameters": schema}} for i in range(200)]
    call = CALL | {"function": {"name": "f", "arguments": {"k": ["y" * 20_000]}}}
    messages = [
        *ASK * 2000,
        {"role": "user", "content": "<think>" * 150_000},
        {"role": "assistant", "tool_calls": [call]},
    ]
    ids = K25.encode(tokenizer, messages, tools)
    assert ids.count(tokenizer.think_begin_id) == 2 and len(ids) > 1_000_000
