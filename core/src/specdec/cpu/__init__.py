"""Kernels for CPUs: SIMD primitives for numba, torch's OpenMP threads, products with packed weights.

Kernel modules, which import numba and which only `specdec.cpu.build` imports: `compile`, `features`, `simd`, `threads`,
`tiles`, `dense`, `regions`. What calls the kernels imports the others.
"""
