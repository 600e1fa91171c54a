"""Requests, batching, sampling, text: what turns a loaded model into answers."""
