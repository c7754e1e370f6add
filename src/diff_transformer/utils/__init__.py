"""Holds what knows nothing of attention: files, manifests, threads, sockets, texts of tokens, words for messages."""
