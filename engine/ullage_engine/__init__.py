"""Inference server with a paged, quantised KV cache whose cold blocks can be evicted."""
