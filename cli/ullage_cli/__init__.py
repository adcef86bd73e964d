"""Command line for people: run an InferenceService manifest on this machine, without a cluster."""
