"""POST /v1/completions: text or token ids in, text out."""

from dataclasses import dataclass, field

from mimo_jax.engine.request import FinishReason, TokenLogprob
from mimo_jax.text import Detokenizer, Tokenizer
from serve.errors import ApiError
from serve.jobs import Choice, Delta
from serve.protocol import CompletionBody, parse_body
from serve.protocol import Prompt as BodyPrompt
from serve.replies import Call, Context, Json, check_model, extras, json_logprob, make_call, token_label

_DEFAULT_MAX_TOKENS = 16


def translate(value: object, context: Context) -> Call:
    """A decoded body as a call. Raises ApiError or RequestError. Encodes text: keep it off an event loop."""
    body = parse_body(CompletionBody, value)
    check_model(body.model, context.served_model)
    params = body.sampling(max_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    prompts = [_token_ids(prompt, context.tokenizer) for prompt in body.prompt]
    reply = CompletionReply(context.tokenizer, body.logprobs, bool(body.return_token_ids))
    return make_call(body, prompts, params, reply, f"cmpl-{context.unique}", context.created)


def _token_ids(prompt: BodyPrompt, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer: send token ids", param="prompt")
    return tokenizer.encode(prompt)


@dataclass
class _Offsets:
    """Where the tokens of one choice begin in its text."""

    detokenizer: Detokenizer | None
    characters: int = 0

    def next(self, token_id: int) -> int:
        """The offset of one more token. The parts of a character all begin where it does."""
        start = self.characters
        if self.detokenizer is not None:
            self.characters += len(self.detokenizer.add([token_id]))
        return start


@dataclass
class CompletionReply:
    """Choices with `text`, and log-probabilities as parallel lists.

    There is an entry for each token that was generated, those of a stop string and the end-of-text token
    included; they may begin behind the end of the text.
    """

    tokenizer: Tokenizer | None
    logprobs: int | None
    return_token_ids: bool
    object_name: str = "text_completion"
    chunk_name: str = "text_completion"
    _offsets: dict[int, _Offsets] = field(default_factory=dict)

    def choice(self, choice: Choice) -> Json:
        return self._choice(
            choice.index, choice.text, choice.logprobs, choice.finish_reason, choice.stop_reason
        ) | extras(choice, return_token_ids=self.return_token_ids, tokenizer=self.tokenizer)

    def opening(self, index: int) -> Json | None:
        return None

    def piece(self, delta: Delta) -> Json:
        piece = self._choice(delta.index, delta.text, delta.logprobs, None, None)
        return piece | ({"token_ids": delta.token_ids} if self.return_token_ids else {})

    def ending(self, delta: Delta) -> Json:
        return self._choice(delta.index, "", None, delta.finish_reason, delta.stop_reason)

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": None if self.logprobs is None or logprobs is None else self._lists(index, logprobs),
            "finish_reason": None if finish_reason is None else finish_reason.value,
            "stop_reason": stop_reason,
        }

    def _lists(self, index: int, entries: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> Json:
        if index not in self._offsets:
            self._offsets[index] = _Offsets(None if self.tokenizer is None else Detokenizer(self.tokenizer))
        return {
            "tokens": [token_label(entry.token_id, self.tokenizer) for entry in entries],
            "token_logprobs": [json_logprob(entry.logprob) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": [self._offsets[index].next(entry.token_id) for entry in entries],
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one."""
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        return {token_label(token_id, self.tokenizer): json_logprob(value) for token_id, value in pairs}
