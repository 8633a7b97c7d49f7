"""Decode worker: pulls pages, streams the answer, tracks the write-back of the conversation."""
