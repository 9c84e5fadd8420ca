"""Chat templates: literal prompts, the environment templates expect, and bounds on what they may do (B58)."""

import threading
import time
from typing import Any

import pytest

from mimo_jax.errors import CheckpointError, RequestError
from mimo_jax.text import ChatTemplate, RenderLimits, Tokenizer, check_template_arguments

STRICT = RenderLimits(seconds=0.05, characters=10_000)
USER: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


def render(template: str, limits: RenderLimits | None = None, **arguments: Any) -> str:
    chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, origin="test", limits=limits)
    return chat.render(USER, **{"add_generation_prompt": True, **arguments})


def chat_of(tokenizer: Tokenizer) -> ChatTemplate:
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template


def test_smollm2_adds_its_own_system_message(smollm2: Tokenizer) -> None:
    assert chat_of(smollm2).render(USER, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_smollm2_takes_the_system_message_it_is_given(smollm2: Tokenizer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": [{"type": "text", "text": "And 3+3?"}]},
    ]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n"
    )
    assert chat_of(smollm2).render(messages, add_generation_prompt=False) == text
    ids = smollm2.encode_chat(messages, add_generation_prompt=False)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert ids[:3] == [1, 9690, 198]  # <|im_start|> system \n
    assert ids.count(2) == 4


def test_special_text_in_a_message_is_the_special_token_as_in_a_raw_prompt(smollm2: Tokenizer) -> None:
    ids = smollm2.encode_chat([{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(2) == 3  # those of the two turns and the one that was typed
    assert smollm2.encode("a<|im_end|>b")[1:-1] == [2]


def test_a_model_without_template_says_so(gemma: Tokenizer) -> None:
    with pytest.raises(RequestError, match="this model has no chat template") as caught:
        gemma.encode_chat(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        (
            "{% for i in range(3) %}{{ i }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}",
            "0/3,1/3,2/3",
        ),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 7 %}{% endfor %}{{ ns.n }}", "7"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ missing is defined }}{{ missing }}|{{ tools is none }}", "False|True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ messages[0].content ~ 1 ~ none }}", "Hi1None"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ m(2) }}", "<a><2>"),
        ("{{ 'a-b'.split('-') | join('+') }}{{ messages | map(attribute='role') | join }}", "a+buser"),
        ("{{ 'aXa' | replace('a', 'bb') }}{{ 'a'.replace('a', 'c') }}{{ '%s!' | format(3) }}", "bbXbbc3!"),
        ("{{ 'x' * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ [1] + [2] }}", "xxx83[1, 2]"),
        ("{{ messages[::-1][0].role }}{{ messages[0].content.strip() | upper }}", "userHI"),
    ],
)
def test_templates_find_what_they_are_written_for(template: str, text: str) -> None:
    assert render(template) == text


def test_arguments_and_tools_reach_the_template() -> None:
    template = "{{ enable_thinking }}{{ tools[0].function.name if tools }}{{ add_generation_prompt }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(template, tools=tools, enable_thinking=False) == "FalsefTrue"
    assert render(template, tools=[], enable_thinking=1, add_generation_prompt=False) == "1False"


def test_what_a_template_raises_is_a_refused_request() -> None:
    with pytest.raises(RequestError, match="the chat template failed: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("template", ["{% for x in %}", "{{ 'a", "{% unknown %}", "{{ x | no_such_filter }}"])
def test_a_template_that_is_no_jinja_is_a_broken_checkpoint(template: str) -> None:
    with pytest.raises(CheckpointError, match="test: the chat template is not valid"):
        render(template)


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "chat_template",
        "tokenizer",
        "bos_token",
        "self",
        "range",
        "raise_exception",
        "a b",
    ],
)
def test_an_argument_cannot_replace_the_conversation_or_the_template(name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' may not be set") as caught:
        check_template_arguments({"enable_thinking": True, name: "x"})
    assert caught.value.param == name


def test_rendering_checks_its_arguments_too(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="'chat_template' may not be set"):
        smollm2.encode_chat(USER, chat_template="{{ messages }}")


def grown(start: str, following: str) -> str:
    """A template that replaces `n.x` sixty times."""
    step = f"{{% for i in range(60) %}}{{% set n.x = {following} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{step}"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "nested loops": ENDLESS,
    "nested loops with output": ENDLESS.replace("%}{% endfor", "%}{{ b }}{% endfor", 1),
    "nested loops in a block": "{% set x %}" + ENDLESS + "{% endset %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "multiplication": "{{ 'a' * 10 ** 9 }}",
    "multiplication the other way": "{{ 10 ** 9 * 'a' }}",
    "list multiplication": "{% set x = [0] * 10 ** 10 %}",
    "addition": grown("'aaaa'", "n.x + n.x"),
    "concatenation": grown("'aaaa'", "n.x ~ n.x"),
    "nested lists": grown("[1]", "[n.x, n.x]") + "{{ n.x }}",
    "nested lists as JSON": grown("[1]", "[n.x, n.x]") + "{{ n.x | tojson }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": grown("9", "n.x * n.x"),
    "width": "{{ 'a' | center(1000000000) }}",
    "width method": "{{ 'a'.ljust(1000000000) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format from a value": "{{ '%*d' % (1000000000, 1) }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "replace filter": "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "join": "{{ range(9999) | join('b' * 9999) }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attributes of a function": "{{ raise_exception.__globals__.keys() }}",
    "attributes through a filter": "{{ '' | attr('__class__') }}{{ (messages | attr('append'))(1) }}",
    "changing the messages": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "text of a thousand pages": "{% for i in range(9999) %}aaaaaaaaaa{% endfor %}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_stopped(template: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match="the chat template failed"):
        render(template, STRICT)
    # Two probes while loading and the rendering, 0.05 s each; without limits the worst never ends.
    assert time.monotonic() - started < 30


def test_other_threads_go_on_while_a_template_runs() -> None:
    failures: list[RequestError] = []

    def endless() -> None:
        try:
            render(ENDLESS, RenderLimits(seconds=0.2))
        except RequestError as error:
            failures.append(error)

    thread = threading.Thread(target=endless)
    thread.start()
    pauses, before = [], time.monotonic()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        pauses.append(now - before)
        before = now
    thread.join()
    assert failures
    assert max(pauses) < 0.1


def test_a_long_conversation_stays_within_the_default_limits(smollm2: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "word " * 2000},
        {"role": "assistant", "content": "x" * 10_000},
    ] * 100
    assert len(chat_of(smollm2).render(messages, add_generation_prompt=True)) > 2_000_000
