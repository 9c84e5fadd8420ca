"""Grouped matmul over the experts of a mixture."""

from pallas_kernels.expert_matmul.api import expert_matmul

__all__ = ["expert_matmul"]
