"""Kubernetes operator: reconciles InferenceService objects and remedies KV-cache risk."""
