"""Sidecar that watches one LLM engine: snapshot, forecast, risk, actions. Never imports torch."""
