"""Speculative decoding: tokens proposed cheaply, verified by the model in one pass, kept where it agrees."""
