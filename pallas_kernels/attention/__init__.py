"""Paged attention, full or windowed, with or without sinks; prefill and decode."""

from pallas_kernels.attention.api import attention_choice, paged_attention

__all__ = ["attention_choice", "paged_attention"]
