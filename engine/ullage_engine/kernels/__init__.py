"""Kernels over the paged KV cache: one pass over memory each, beside the torch code that says what they compute."""
