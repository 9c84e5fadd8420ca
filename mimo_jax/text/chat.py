"""The chat template of a model: messages to prompt text.

Special-token text inside a message ("<|im_end|>" typed by a user) is not escaped: `Tokenizer` recognises it
wherever it stands, in chats and raw prompts alike. BOS is written by the template or not at all.
"""

from collections.abc import Mapping
from typing import Any

import jinja2

from mimo_jax.errors import CheckpointError, RequestError
from mimo_jax.text.messages import normalise_messages
from mimo_jax.text.template_sandbox import BoundedEnvironment, RenderLimits

# Arguments that a caller may not smuggle in beside the conversation. The token texts come from the
# checkpoint.
_RESERVED_ARGUMENTS = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "chat_template", "tokenizer", "tokenize"}
    | {f"{role}_token" for role in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")}
    | {"raise_exception", "strftime_now", "range", "dict", "namespace", "cycler", "joiner"}
)
_PROBE = "ProbeForTheFormOfContent"


def check_template_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises RequestError if a template argument would replace the conversation or the template itself.

    Servers call this on arguments from a request before passing them on as keywords; `ChatTemplate.render`
    calls it again. Ordinary switches (enable_thinking, documents) pass.
    """
    for name in arguments:
        if name in _RESERVED_ARGUMENTS or not name.isidentifier():
            raise RequestError(f"the template argument {name!r} may not be set by a request", param=name)


class ChatTemplate:
    """A compiled template. Safe to share between threads; rendering blocks, so keep it off an event loop."""

    def __init__(
        self,
        source: str,
        token_texts: Mapping[str, str],
        *,
        origin: str,
        limits: RenderLimits | None = None,
    ) -> None:
        """`token_texts` are the variables bos_token, eos_token, ...; `origin` is named in errors.

        Raises CheckpointError for a template that is not valid Jinja.
        """
        self.source = source
        self._token_texts = dict(token_texts)
        self._environment = BoundedEnvironment(limits or RenderLimits())
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise CheckpointError(f"{origin}: the chat template is not valid ({error})") from error
        self._wants_parts = self._reads_only_parts()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; `messages` go through `normalise_messages` first.

        `kwargs` are further template variables, such as enable_thinking. Raises RequestError for messages or
        arguments that are refused, if the template itself raises, and if it exceeds its time or size limit.
        """
        check_template_arguments(kwargs)
        conversation = normalise_messages(messages)
        if self._wants_parts:
            conversation = [_with_parts(message) for message in conversation]
        variables = {**kwargs, "messages": conversation, "tools": tools or None}
        return self._render({**variables, "add_generation_prompt": add_generation_prompt})

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render(self._template, {**self._token_texts, **variables})
        except Exception as error:  # whatever a template does wrong ends as one refused request
            raise RequestError(f"the chat template failed: {error}", param="messages") from error

    def _reads_only_parts(self) -> bool:
        """Whether the template drops content that is a string and shows it as a list of parts."""
        message = {"role": "user", "content": _PROBE}
        return not self._shows_probe(message) and self._shows_probe(_with_parts(message))

    def _shows_probe(self, message: dict[str, Any]) -> bool:
        variables = {"messages": [message], "tools": None, "add_generation_prompt": True}
        try:
            return _PROBE in self._render(variables)
        except RequestError:
            return False


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
