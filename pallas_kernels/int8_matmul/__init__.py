"""Matmul with int8 weights, and float or int8 activations."""

from pallas_kernels.int8_matmul.api import int8_matmul, int8_matmul_choice

__all__ = ["int8_matmul", "int8_matmul_choice"]
