"""The tests mirror the tree of the packages. Shared assertions live in ``tests/_asserts.py``."""
