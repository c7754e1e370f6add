"""Serves a model over HTTP, as OpenAI's API does: transformers' server generates, and this package speaks HTTP."""
