"""HTTP side of the engine: the OpenAI interface, the admin interface, and text to and from tokens."""
