"""The two ways to ask for text, under the paths that HTTP requests and batch lines name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from serve import chat, completions
from serve.replies import Call, Context

ENDPOINTS: Mapping[str, Callable[[object, Context], Call]] = MappingProxyType(
    {"/v1/completions": completions.translate, "/v1/chat/completions": chat.translate}
)
