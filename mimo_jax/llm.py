"""LLM: the offline Python API, in vLLM's vocabulary."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mimo_jax.engine.engine import Engine, Update
from mimo_jax.engine.request import Request
from mimo_jax.engine.setup import EngineOptions, load_engine
from mimo_jax.engine.speculation import DraftMetrics
from mimo_jax.errors import RequestError, short
from mimo_jax.outputs import RequestOutput, completion, prompt_logprobs
from mimo_jax.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any]


class LLM:
    """A model ready to generate. Use it from one thread at a time.

    model is a Hugging Face folder, a .gguf file or a built-in name ("demo"). The other options are those of
    `EngineOptions`. Raises CheckpointError when the model cannot be loaded, ValueError when an option is out of
    range.

        llm = LLM("demo")
        llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 256,
        block_size: int = 16,
        kv_cache_memory_bytes: int | None = None,
        num_speculative_tokens: int | None = None,
        seed: int = 0,
        hf_overrides: dict[str, Any] | None = None,
        progress: bool = True,
    ) -> None:
        options = EngineOptions(
            model=model,
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_speculative_tokens=num_speculative_tokens,
            seed=seed,
            hf_overrides=hf_overrides,
        )
        self._start(load_engine(options, progress=progress), progress)

    @classmethod
    def from_engine(cls, engine: Engine, *, progress: bool = True) -> "LLM":
        """An LLM around an engine that was made elsewhere."""
        llm = cls.__new__(cls)
        llm._start(engine, progress)
        return llm

    def _start(self, engine: Engine, progress: bool) -> None:
        self.engine = engine
        self._progress = progress
        self._counter = itertools.count()

    @property
    def draft_metrics(self) -> DraftMetrics:
        """What the draft heads guessed and how much of it stood, since the model was loaded."""
        return self.engine.speculation.metrics

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts: strings, {"prompt": text} or {"prompt_token_ids": [ids]}; one or a list of them.

        Returns one RequestOutput per prompt, in order. All prompts are checked before any runs: RequestError names
        the first that cannot be served, and nothing stays queued, whatever ends the call.
        """
        self._check_idle()
        listed = _listed(prompts, str | Mapping, "prompts")
        params = self._params(sampling_params, len(listed))
        texts, groups = [], []
        for place, (prompt, one) in enumerate(zip(listed, params, strict=True)):
            try:
                text, ids = self._encode(prompt)
                parent = self.engine.make_request(str(next(self._counter)), ids, one)
            except RequestError as error:
                raise RequestError(f"prompt {place}: {error}", param=error.param) from error
            texts.append(text)
            groups.append(self.engine.choices(parent))
        written = self._run([request for group in groups for request in group], use_tqdm)
        return [
            RequestOutput(
                request_id=group[0].request_id.rpartition("-")[0],
                prompt=text,
                prompt_token_ids=list(group[0].prompt),
                outputs=[completion(request, written[request.request_id], self.tokenizer) for request in group],
                prompt_logprobs=prompt_logprobs(group[0], self.tokenizer),
            )
            for text, group in zip(texts, groups, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of {"role", "content"}) or a list of conversations."""
        listed = _listed(messages, str | Mapping, "messages")
        conversations = [listed] if not listed or isinstance(listed[0], Mapping) else listed
        prompts = [{"prompt_token_ids": self.encode_chat(chat, chat_template_kwargs)} for chat in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def encode_chat(self, messages: Sequence[Any], chat_template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Prompt ids of a conversation, ready for the assistant's turn."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: give prompt_token_ids to generate()", param="messages")
        return self.tokenizer.encode_chat(list(messages), **(chat_template_kwargs or {}))

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [len, vocab]: row i is the log-probability of every token behind token_ids[: i + 1].

        Teacher-forced through the same paged steps that generate. Raises RequestError as generate does.
        """
        self._check_idle()
        token_ids = _listed(token_ids, (), "token_ids")
        request = self.engine.make_request(
            str(next(self._counter)), token_ids, SamplingParams(max_tokens=1, temperature=0)
        )
        rows: list[np.ndarray] = []
        scored = replace(
            request, on_hidden=lambda hidden: rows.append(self.engine.steps.log_probs(self.engine.params, hidden))
        )
        self._run([scored], use_tqdm=False, scoring=True)
        return np.concatenate(rows)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Update]:
        """Completes one prompt, one Update a token. Closing the iterator early ends the request."""
        self._check_idle()
        _, ids = self._encode(prompt)
        params = self._params(sampling_params, 1)[0]
        if params.n != 1:
            raise RequestError(f"n={params.n}; a stream has one choice", param="n")
        request = self.engine.make_request(str(next(self._counter)), ids, params)
        self._warm_up([request], scoring=params.prompt_logprobs is not None)
        self.engine.add(request)
        try:
            while not request.finished:
                yield from self.engine.step()
        finally:
            self.engine.abort(request.request_id)

    def _check_idle(self) -> None:
        if self.engine.unfinished:
            raise RequestError("a stream of this LLM is still open: exhaust it or close() it first")

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, prompts: int
    ) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * prompts
        given = _listed(given, (), "sampling_params")
        if not all(isinstance(one, SamplingParams) for one in given):
            raise RequestError("sampling_params has something that is no SamplingParams", param="sampling_params")
        if len(given) != prompts:
            raise RequestError(f"{len(given)} sampling_params for {prompts} prompts", param="sampling_params")
        return given

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, Mapping):
            if set(prompt) == {"prompt_token_ids"}:
                return None, _listed(prompt["prompt_token_ids"], (), "prompt_token_ids")
            if set(prompt) != {"prompt"}:
                raise RequestError(
                    f"a prompt with the keys {sorted(prompt)}; prompt or prompt_token_ids", param="prompt"
                )
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise RequestError(f"a prompt of type {type(prompt).__name__}; a string is needed", param="prompt")
        if self.tokenizer is None:
            raise RequestError('this model has no tokenizer: give {"prompt_token_ids": [...]}', param="prompt")
        return prompt, self.tokenizer.encode(prompt)

    def _warm_up(self, requests: Sequence[Request], *, scoring: bool) -> None:
        self.engine.warm_up(
            len(requests),
            max(len(request.prompt) for request in requests),
            max(len(request.prompt) + request.max_tokens for request in requests),
            alone=len(requests) == 1,
            scoring=scoring,
            progress=self._progress,
        )

    def _run(self, requests: Sequence[Request], use_tqdm: bool | None, *, scoring: bool = False) -> dict[str, str]:
        """Runs requests to their end; their texts by request id. Nothing stays queued, whatever ends the call."""
        if not requests:
            return {}
        scoring = scoring or any(request.params.prompt_logprobs is not None for request in requests)
        self._warm_up(requests, scoring=scoring)
        pieces: dict[str, list[str]] = {request.request_id: [] for request in requests}
        show = self._progress if use_tqdm is None else use_tqdm
        try:
            for request in requests:
                self.engine.add(request)
            with tqdm(desc="generating", unit=" tokens", disable=not show) as bar:
                while self.engine.unfinished:
                    for update in self.engine.step():
                        pieces[update.request.request_id].append(update.text)
                        bar.update(len(update.token_ids))
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
        return {request_id: "".join(texts) for request_id, texts in pieces.items()}


def _listed(value: Any, single: Any, name: str) -> Sequence[Any]:
    """A list of what was given: one thing of the type `single`, or any iterable of things."""
    if single and isinstance(value, single):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise RequestError(f"{name}={short(value)}; a list is needed", param=name)
    return list(value)
