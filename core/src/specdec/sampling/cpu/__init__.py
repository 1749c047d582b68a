"""Fast paths for CPUs, compiled with numba.

Each module compiles (or reads from its cache) when first imported, so import them inside functions. They run on the
calling thread: the cores belong to torch's thread pool, and numba's own pool would fight it.
"""
