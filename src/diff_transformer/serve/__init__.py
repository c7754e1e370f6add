"""Serves a model over HTTP, as OpenAI's API does: transformers generates, and this package speaks HTTP."""
