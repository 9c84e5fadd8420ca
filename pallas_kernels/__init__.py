"""Kernels: arrays in, arrays out, one device. See README.md in this folder."""
