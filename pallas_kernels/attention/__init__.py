"""Paged attention, full or windowed, with or without sinks; prefill and decode."""

from pallas_kernels.attention.api import paged_attention

__all__ = ["paged_attention"]
