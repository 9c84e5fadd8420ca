"""Grouped matmul over the experts of a mixture, for every weight format."""

from pallas_kernels.expert_matmul.api import expert_matmul, expert_matmul_choice

__all__ = ["expert_matmul", "expert_matmul_choice"]
