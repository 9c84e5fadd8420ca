from typing import Any

import pytest

from mimo_jax.llm import LLM
from tests.serve.client import Server

HELLO = [{"role": "user", "content": "hello"}]


def test_an_answer_is_the_completion_of_the_rendered_messages(server: Server, llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    answer = server.chat(messages=messages, temperature=0, max_tokens=20)
    ids = llm.encode_chat(messages)
    completion = server.complete(prompt=ids, temperature=0, max_tokens=20)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": completion["choices"][0]["text"],
        "refusal": None,
    }
    assert choice["finish_reason"] == completion["choices"][0]["finish_reason"]
    assert answer["usage"] == completion["usage"]
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("content", ["hello", [{"type": "text", "text": "hello"}]], ids=["string", "one text part"])
def test_message_forms_that_mean_the_same_have_the_same_answer(server: Server, content: Any) -> None:
    messages = [{"role": "user", "content": content, "name": None, "tool_calls": []}]
    answer = server.chat(messages=messages, temperature=0, max_tokens=8)
    expected = server.chat(messages=HELLO, temperature=0, max_tokens=8)
    assert answer["choices"] == expected["choices"]
    assert answer["usage"] == expected["usage"]


def test_developer_is_the_system_role_and_null_content_of_an_assistant_is_empty(server: Server, llm: LLM) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None},
        *HELLO,
    ]
    plain = [{"role": "system", "content": "be brief"}, {"role": "assistant", "content": ""}, *HELLO]
    answer = server.chat(messages=messages, temperature=0, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(llm.encode_chat(plain))


def test_without_a_limit_an_answer_may_fill_the_context(server: Server) -> None:
    answer = server.chat(messages=HELLO, temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 128
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_hold(server: Server, name: str) -> None:
    answer = server.chat(messages=HELLO, ignore_eos=True, **{name: 3})
    assert answer["usage"]["completion_tokens"] == 3


def test_log_probabilities_have_an_entry_a_token_with_its_bytes(server: Server, llm: LLM) -> None:
    (choice,) = server.chat(
        messages=HELLO,
        temperature=0,
        max_tokens=10,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
        return_token_ids=True,
    )["choices"]
    content = choice["logprobs"]["content"]
    data = [bytes(entry["bytes"]) for entry in content]
    assert data == [llm.tokenizer.token_bytes(token_id) for token_id in choice["token_ids"]]
    for entry in content:
        assert len(entry["top_logprobs"]) == 4
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy: the likeliest was chosen
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]


def test_logprobs_alone_have_no_alternatives(server: Server) -> None:
    (choice,) = server.chat(messages=HELLO, max_tokens=4, logprobs=True)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [
        [] for _ in choice["logprobs"]["content"]
    ]


def test_flags_reach_the_template(server: Server, llm: LLM) -> None:
    answer = server.chat(messages=HELLO, max_tokens=1, chat_template_kwargs={"enable_thinking": True})
    plain = len(llm.encode_chat(HELLO))
    assert answer["usage"]["prompt_tokens"] == plain + len("[on]")


def test_choices_are_a_group_whose_prompt_counts_once(server: Server, llm: LLM) -> None:
    answer = server.chat(messages=HELLO, n=3, seed=1, max_tokens=7, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["prompt_tokens"] == len(llm.encode_chat(HELLO))
    assert answer["usage"]["completion_tokens"] == 21


def test_what_clients_send_by_default_is_accepted(server: Server) -> None:
    answer = server.chat(
        messages=HELLO,
        temperature=0,
        max_tokens=8,
        frequency_penalty=0,
        function_call=None,
        functions=None,
        logit_bias=None,
        metadata={},
        modalities=["text"],
        parallel_tool_calls=True,
        presence_penalty=0,
        repetition_penalty=1.0,
        response_format={"type": "text"},
        service_tier="auto",
        store=False,
        tool_choice="auto",
        tools=[],
        top_logprobs=None,
        top_p=1,
        user="someone",
    )
    assert answer["choices"] == server.chat(messages=HELLO, temperature=0, max_tokens=8)["choices"]
