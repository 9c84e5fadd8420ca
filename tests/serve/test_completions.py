from mimo_jax.llm import LLM
from mimo_jax.sampling_params import SamplingParams
from tests.serve.client import MODEL_NAME, Server


def test_a_completion_is_the_text_of_the_python_api(server: Server, llm: LLM) -> None:
    answer = server.complete(prompt="hello", temperature=0, max_tokens=20)
    (expected,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20))[0].outputs
    (choice,) = answer["choices"]
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    assert choice["logprobs"] is None
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == MODEL_NAME
    tokens = len(expected.token_ids)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": tokens,
        "total_tokens": 5 + tokens,
    }


def test_without_max_tokens_a_completion_has_sixteen(server: Server) -> None:
    answer = server.complete(prompt="hello", temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_may_be_text_or_ids_alone_or_in_a_list(server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode("abc")
    texts = [
        server.complete(prompt=prompt, temperature=0)["choices"][0]["text"] for prompt in ("abc", ["abc"], ids, [ids])
    ]
    assert len(set(texts)) == 1


def test_choices_of_several_prompts_are_numbered_through(server: Server) -> None:
    prompts = ["abc", "xyz"]
    answer = server.complete(prompt=prompts, n=2, temperature=0, ignore_eos=True)
    alone = [server.complete(prompt=prompt, temperature=0, ignore_eos=True) for prompt in prompts]
    expected = [alone[place]["choices"][0]["text"] for place in (0, 0, 1, 1)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 64, "total_tokens": 70}


def test_seeded_choices_differ_from_each_other_and_repeat(server: Server) -> None:
    def texts() -> list[str]:
        answer = server.complete(prompt="abc", n=6, seed=5, max_tokens=12, ignore_eos=True)
        return [choice["text"] for choice in answer["choices"]]

    first = texts()
    assert len(set(first)) == 6
    assert texts() == first


def test_unseeded_requests_differ(server: Server) -> None:
    answers = [server.complete(prompt="abc", ignore_eos=True)["choices"][0]["text"] for _ in range(3)]
    assert len(set(answers)) == 3


def test_top_k_one_is_greedy(server: Server) -> None:
    greedy = server.complete(prompt="abc", temperature=0)
    assert server.complete(prompt="abc", top_k=1, temperature=5)["choices"] == greedy["choices"]


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(server: Server, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    whole = llm.generate("abc", params)[0].outputs[0].text
    stop = whole[3:5]
    (choice,) = server.complete(prompt="abc", temperature=0, max_tokens=30, stop=["never", stop])["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_stop_token_ends_the_text(server: Server, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    stop_id = llm.generate("abc", params)[0].outputs[0].token_ids[4]
    answer = server.complete(prompt="abc", temperature=0, ignore_eos=True, stop_token_ids=[stop_id])
    assert answer["choices"][0]["stop_reason"] == stop_id
    assert answer["usage"]["completion_tokens"] <= 5


def test_log_probabilities_are_parallel_lists_in_the_old_form(server: Server, llm: LLM) -> None:
    (choice,) = server.complete(
        prompt="abc", temperature=0, max_tokens=12, logprobs=3, ignore_eos=True, return_token_ids=True
    )["choices"]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
    (expected,) = llm.generate("abc", params)[0].outputs
    lists = choice["logprobs"]
    assert {name: len(values) for name, values in lists.items()} == {
        "tokens": 12,
        "token_logprobs": 12,
        "top_logprobs": 12,
        "text_offset": 12,
    }
    assert choice["token_ids"] == expected.token_ids
    assert expected.logprobs is not None
    for place, (token_id, entry) in enumerate(zip(expected.token_ids, expected.logprobs, strict=True)):
        data = llm.tokenizer.token_bytes(token_id)
        token = lists["tokens"][place]
        assert abs(lists["token_logprobs"][place] - entry[token_id].logprob) < 1e-4
        assert token in lists["top_logprobs"][place]
        assert len(lists["top_logprobs"][place]) in (3, 4)
        if data.isascii() and token_id not in llm.tokenizer.special_ids:
            assert choice["text"].startswith(token, lists["text_offset"][place])
        else:
            assert token.startswith("bytes:") or token_id in llm.tokenizer.special_ids
    assert lists["text_offset"] == sorted(lists["text_offset"])


def test_zero_logprobs_report_the_chosen_tokens_alone(server: Server) -> None:
    (choice,) = server.complete(prompt="abc", temperature=0, logprobs=0)["choices"]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        [token] for token in choice["logprobs"]["tokens"]
    ]


def test_prompt_log_probabilities_begin_with_null(server: Server, llm: LLM) -> None:
    (choice,) = server.complete(prompt="abcdefghijklmnopqrstuvw", prompt_logprobs=2, max_tokens=1)["choices"]
    ids = llm.tokenizer.encode("abcdefghijklmnopqrstuvw")
    entries = choice["prompt_logprobs"]
    rows = llm.score(ids)
    assert entries[0] is None
    assert len(entries) == len(ids)
    for place, token_id in enumerate(ids[1:], start=1):
        entry = entries[place][str(token_id)]
        assert abs(entry["logprob"] - rows[place - 1, token_id]) < 1e-4
        assert entry["decoded_token"] == llm.tokenizer.token_text(token_id)
        assert min(one["rank"] for one in entries[place].values()) == 1


def test_what_clients_send_by_default_is_accepted(server: Server) -> None:
    answer = server.complete(
        prompt="abc",
        temperature=0,
        best_of=1,
        echo=False,
        frequency_penalty=0,
        logit_bias={},
        logprobs=None,
        metadata={"run": "7"},
        n=None,
        presence_penalty=0.0,
        seed=None,
        stop=None,
        stream=False,
        stream_options=None,
        suffix=None,
        user="someone",
    )
    assert answer["choices"] == server.complete(prompt="abc", temperature=0)["choices"]


def test_a_model_without_a_tokenizer_takes_and_returns_ids(ids_only_server: Server) -> None:
    answer = ids_only_server.complete(
        prompt=[5, 6, 7], temperature=0, max_tokens=9, return_token_ids=True, logprobs=1, stop=[]
    )
    (choice,) = answer["choices"]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 9
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert answer["usage"]["completion_tokens"] == 9
    events = ids_only_server.stream(
        "/v1/completions", prompt=[5, 6, 7], temperature=0, max_tokens=9, return_token_ids=True
    )
    streamed = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert streamed == choice["token_ids"]


def test_a_model_without_a_tokenizer_refuses_text(ids_only_server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/completions", {"prompt": [1], "stop": ["x"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        response = ids_only_server.http.post(path, json={"model": MODEL_NAME} | body)
        assert response.status_code == 400
        assert "tokenizer" in response.json()["error"]["message"]
