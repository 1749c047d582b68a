"""Compiled kernels for CPUs: SIMD primitives for numba, torch's OpenMP threads, products with packed weights."""
