"""POST /v1/chat/completions: messages in, the assistant's message out."""

from collections.abc import Sequence
from dataclasses import dataclass

from mimo_jax.engine.request import TokenLogprob
from mimo_jax.text import Tokenizer, check_template_arguments
from serve.errors import ApiError
from serve.jobs import Choice, Delta
from serve.protocol import ChatBody, parse_body
from serve.replies import Call, Context, Json, check_model, extras, json_logprob, make_call, token_label


def translate(value: object, context: Context) -> Call:
    """A decoded body as a call. Raises ApiError or RequestError. Renders a template, so keep it off an event
    loop.
    """
    body = parse_body(ChatBody, value)
    check_model(body.model, context.served_model)
    if context.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer: send token ids to /v1/completions", param="messages")
    params = body.sampling(max_tokens=_max_tokens(body), logprobs=_alternatives(body))
    arguments = body.chat_template_kwargs or {}
    check_template_arguments(arguments)
    token_ids = context.tokenizer.encode_chat(body.messages, **arguments)
    reply = ChatReply(context.tokenizer, bool(body.logprobs), bool(body.return_token_ids))
    return make_call(body, [token_ids], params, reply, f"chatcmpl-{context.unique}", context.created)


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(400, f"max_tokens={old} contradicts max_completion_tokens={new}", param="max_tokens")
    return old if new is None else new


def _alternatives(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs need logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


@dataclass(frozen=True)
class ChatReply:
    """Choices with a `message` or, in a stream, a `delta`. Log-probabilities have an entry for each token
    generated.
    """

    tokenizer: Tokenizer
    logprobs: bool
    return_token_ids: bool
    object_name: str = "chat.completion"
    chunk_name: str = "chat.completion.chunk"

    def choice(self, choice: Choice) -> Json:
        assert choice.finish_reason is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason.value,
            "stop_reason": choice.stop_reason,
        } | extras(choice, return_token_ids=self.return_token_ids, tokenizer=self.tokenizer)

    def opening(self, index: int) -> Json | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def piece(self, delta: Delta) -> Json:
        return {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": None,
        } | ({"token_ids": delta.token_ids} if self.return_token_ids else {})

    def ending(self, delta: Delta) -> Json:
        assert delta.finish_reason is not None
        return {
            "index": delta.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": delta.finish_reason.value,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if not self.logprobs:
            return None
        content = [
            self._token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._token(token_id, value) for token_id, value in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        data = list(self.tokenizer.token_bytes(token_id))
        return {
            "token": token_label(token_id, self.tokenizer),
            "logprob": json_logprob(logprob),
            "bytes": data,
        }
