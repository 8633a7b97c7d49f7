"""Namespaces: their names, numbers and settings, who may use them, and the records that all nodes share.

Pure. May import: protocol, policies.
"""
