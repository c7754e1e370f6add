"""Holds parts without attention: files, manifests, threads, sockets, texts of tokens, words for messages."""
