"""Text: tokenizers of Hugging Face folders and GGUF files, chat templates, streaming detokenization, stop
strings.
"""

from pathlib import Path

from mimo_jax.errors import CheckpointError
from mimo_jax.text.chat import ChatTemplate, check_template_arguments
from mimo_jax.text.detokenizer import Detokenizer
from mimo_jax.text.gguf_vocab import load_gguf_tokenizer
from mimo_jax.text.hf_folder import load_folder_tokenizer
from mimo_jax.text.messages import normalise_messages
from mimo_jax.text.stop_strings import StopStrings, TextStream
from mimo_jax.text.template_sandbox import RenderLimits
from mimo_jax.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "RenderLimits",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "check_template_arguments",
    "load_tokenizer",
    "normalise_messages",
]


def load_tokenizer(model: Path) -> Tokenizer | None:
    """The tokenizer of a model folder or a .gguf file; None if the model comes without one.

    Raises CheckpointError for a path that is neither, and for a tokenizer that is damaged or of an unknown
    kind.
    """
    if (model / "tokenizer.gguf").is_file():  # a model that was converted from a GGUF file
        return load_gguf_tokenizer(model / "tokenizer.gguf")
    if model.is_dir():
        return load_folder_tokenizer(model)
    if model.suffix == ".gguf":
        return load_gguf_tokenizer(model)
    found = "a file of another kind" if model.exists() else "not there"
    raise CheckpointError(f"{model}: is {found}; a model folder or a .gguf file is needed")
