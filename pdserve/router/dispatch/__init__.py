"""Carrying out a plan at the workers: settle, prefill, decode, retry, relay and resume.

May import: request, placement, fleet, upstream, sessions, metrics, api, config. `admission` is its equal.
"""
